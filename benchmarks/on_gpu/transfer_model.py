"""Models of random weights, the same in every process that makes them on one device.

Owns their sizes and their weights. Knows neither processes nor transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.model_config import ModelConfig
from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.contests import model_contests
from engine.kernels.model_tuning import store_of
from engine.kv_cache import CacheShape, KVCache
from engine.model.decoder import Decoder
from engine.model.forward_pass import DecoderWeights
from engine.model.fused_pass import FusedPass
from engine.model.layer import LayerWeights, Mlp, Projection
from engine.runner import ModelRunner

_SEED = 20
_EMBEDDING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """settings: as in a config.json.  dtype: of weights and computation.  block_size: tokens per block."""

    settings: Mapping[str, Any]
    dtype: torch.dtype
    block_size: int

    @property
    def config(self) -> ModelConfig:
        """What it computes."""
        return ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **self.settings})


# interpreted: for a CPU, which takes milliseconds for each program of a kernel.
# exact: small enough for float32; of so many layers that a frame has several.
# llama-8b: the sizes of Llama-3.1-8B.
SIZES = {
    "interpreted": ModelSize(
        settings={
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 512,
        },
        dtype=torch.float32,
        block_size=4,
    ),
    "exact": ModelSize(
        settings={
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16_384,
        },
        dtype=torch.float32,
        block_size=16,
    ),
    "llama-8b": ModelSize(
        settings={
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
        },
        dtype=torch.bfloat16,
        block_size=16,
    ),
}


def make_runner(size: ModelSize, num_tokens: int, device: torch.device) -> ModelRunner:
    """A model with a cache for so many tokens; its layers are computed by the fused kernels."""
    config = size.config
    model = Decoder(config, _Weights(config, size.dtype, device).make())
    model.forward_pass = FusedPass(config, known_choices(size, device))
    shape = cache_shape(size, -(-num_tokens // size.block_size))
    return ModelRunner(model, KVCache(shape, device))


def cache_shape(size: ModelSize, num_blocks: int, num_layers: int = 0) -> CacheShape:
    """A model's cache. num_layers: 0 for all of them."""
    config = size.config
    return CacheShape(
        num_blocks=num_blocks,
        num_layers=num_layers or config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=size.block_size,
        head_dim=config.head_dim,
        dtype=size.dtype,
    )


def known_choices(size: ModelSize, device: torch.device) -> Choices:
    """What was measured here before, as far as that got; nothing is measured now."""
    store = store_of(device)
    if store is None:
        return UNMEASURED
    known = store.read()
    contests = model_contests(size.config, cache_shape(size, num_blocks=1), size.dtype, device)
    return known.choices([contest.key for contest in contests if contest.key in known.ladders])


class _Weights:
    """Draws weights that keep the residual stream's size, so that every token and position matters."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(_SEED)

    def make(self) -> DecoderWeights:
        """All of them."""
        config = self._config
        return DecoderWeights(
            # Small: what attention adds is to matter from the first layer on.
            embedding=self._matrix(config.vocab_size, config.hidden_size, _EMBEDDING),
            embedding_scale=1.0,
            layers=[self._layer() for _ in range(config.num_layers)],
            norm=self._norm(),
            head=self._matrix(config.vocab_size, config.hidden_size),
        )

    def _layer(self) -> LayerWeights:
        config = self._config
        hidden, attended = config.hidden_size, config.num_heads * config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        return LayerWeights(
            input_norm=self._norm(),
            qkv=Projection(weight=self._matrix(heads * config.head_dim, hidden)),
            head_norm=None,
            output=Projection(weight=self._matrix(hidden, attended)),
            attention_out_norm=None,
            mlp_norm=self._norm(),
            mlp=Mlp(
                activation=config.activation,
                gate_up=Projection(weight=self._matrix(2 * config.intermediate_size, hidden)),
                down=Projection(weight=self._matrix(hidden, config.intermediate_size)),
            ),
            mlp_out_norm=None,
        )

    def _matrix(self, num_rows: int, num_columns: int, deviation: float | None = None) -> torch.Tensor:
        matrix = torch.empty(num_rows, num_columns, dtype=self._dtype, device=self._device)
        return matrix.normal_(0.0, deviation or num_columns**-0.5, generator=self._generator)

    def _norm(self) -> torch.Tensor:
        return torch.ones(self._config.hidden_size, dtype=torch.float32, device=self._device)
