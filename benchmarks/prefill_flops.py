"""What a prompt's prefill has to compute, by formula, and the rates at which a machine is found to do it.

    FLOPs per token = 2 * params + 4 * layers * heads * head_dim * keys

params: those of the projections that every token passes. The last layer ends after its queries, keys and
values for all but the last token, which alone has logits; embedding and head are left out.
keys: how many a token sees in the mean: half the context, or less in layers with a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.model_config import LayerConfig, ModelConfig


def linear_flops(config: ModelConfig) -> float:
    """Of one token in the projections."""
    heads_dim = config.num_heads * config.head_dim
    qkv = config.hidden_size * (heads_dim + 2 * config.num_kv_heads * config.head_dim)
    behind = [heads_dim * config.hidden_size + _mlp_params(config, layer) for layer in config.layers[:-1]]
    return 2.0 * (len(config.layers) * qkv + sum(behind))


def attention_flops(config: ModelConfig, num_tokens: int) -> float:
    """Of one token of a prompt of num_tokens, in the mean: scores and weighted values."""
    keys = sum(mean_keys(num_tokens, layer.window) for layer in config.layers)
    return 4.0 * config.num_heads * config.head_dim * keys


def mean_keys(num_tokens: int, window: int) -> float:
    """How many keys a token of a prompt sees, itself among them; window 0 shows all."""
    seen = min(window or num_tokens, num_tokens)
    return (seen * (seen + 1) / 2 + (num_tokens - seen) * seen) / num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRates:
    """linear, attention: FLOP/s at which the formula's two parts add up to what was measured.

    error: largest share by which a measured time differs from them.
    """

    linear: float
    attention: float
    error: float

    @classmethod
    def of(cls, linear: float, attention: Sequence[float], seconds: Sequence[float]) -> FittedRates:
        """Of two lengths or more, per token: FLOPs of the parts, and time. Least squares of relative errors.

        >>> fitted = FittedRates.of(100.0, [10.0, 40.0], [3.0, 6.0])
        >>> round(fitted.linear), round(fitted.attention)
        (50, 10)
        """
        parts = np.stack([np.full(len(attention), linear), np.asarray(attention)], axis=1)
        shares = parts / np.asarray(seconds)[:, None]
        seconds_per_flop = np.linalg.lstsq(shares, np.ones(len(seconds)), rcond=None)[0]
        rates = [float(1 / value) for value in seconds_per_flop]
        error = float(np.abs(shares @ seconds_per_flop - 1).max())
        return cls(linear=rates[0], attention=rates[1], error=error)


def _mlp_params(config: ModelConfig, layer: LayerConfig) -> int:
    if layer.is_moe:
        assert config.moe is not None
        chosen = config.moe.num_chosen * config.moe.intermediate_size
        return config.hidden_size * (3 * chosen + config.moe.num_experts)
    return 3 * config.hidden_size * config.intermediate_size
