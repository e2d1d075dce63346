"""What a model costs by formula: floating point operations and bytes, of its configuration alone.

    prefill of S tokens:  FLOP = 2 * P_lin * S + 2 * L * H * h * S^2 + 2 * V * D       (causal attention)
    decode of B answers:  FLOP = 2 * P_tot * B + 4 * L * H * h * sum(context)
                          bytes = w * P_read + KV * sum(context)
    KV bytes per token:   2 * L * K * h * c

L layers, D hidden, H query heads, K kv heads, h head size, V vocabulary, w bytes per weight, c per element of
KV. P_lin: weights of the layers' products that one token passes; P_tot: and of the head. P_read: weights that
a step reads; of the E experts of a layer those that its B tokens choose, k each: E (1 - (1 - k/E)^B) in the
mean if each choice is as likely. A window of W tokens leaves S W - W^2/2 of S^2/2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from baton.model_config import LayerConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Of one model. weight_bytes, kv_element_bytes: bytes per weight, and per element of KV."""

    config: ModelConfig
    weight_bytes: float = 2.0
    kv_element_bytes: float = 2.0
    # P_lin: every search asks for it thousands of times.
    linear_params: int = field(init=False)

    def __post_init__(self) -> None:
        passed = sum(self._layer_params(layer, chosen_only=True) for layer in self.config.layers)
        object.__setattr__(self, "linear_params", passed)

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """In 16 bits, weights and KV alike."""
        return cls(config=config)

    @property
    def stored_bytes(self) -> float:
        """Of all weights, embedding and head included."""
        config = self.config
        embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        layers = sum(self._layer_params(layer, chosen_only=False) for layer in config.layers)
        return self.weight_bytes * (layers + embeddings)

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.kv_element_bytes

    def prefill_flops(self, num_tokens: float) -> float:
        """Of one prompt."""
        config = self.config
        attention = 0.0
        for layer in config.layers:
            window = min(layer.window or num_tokens, num_tokens)
            pairs = window * (num_tokens - window / 2)
            attention += 4 * config.num_heads * config.head_dim * pairs
        return 2 * self.linear_params * num_tokens + attention + 2 * self._head_params

    def decode_flops(self, batch: float, context: float) -> float:
        """Of one step of a batch whose contexts are that long in the mean."""
        config = self.config
        attention = sum(
            4 * config.num_heads * config.head_dim * (min(context, layer.window) if layer.window else context)
            for layer in config.layers
        )
        return batch * (2 * (self.linear_params + self._head_params) + attention)

    def decode_bytes(self, batch: float, context: float) -> float:
        """Read by one such step."""
        config = self.config
        weights = float(self._head_params + self.linear_params)
        if (moe := config.moe) is not None:
            expert = 3 * config.hidden_size * moe.intermediate_size
            read = moe.num_experts * (1 - (1 - moe.num_chosen / moe.num_experts) ** max(1.0, batch))
            weights += sum(layer.is_moe for layer in config.layers) * expert * (read - moe.num_chosen)
        per_layer = self.kv_bytes_per_token / config.num_layers
        kv = sum(
            per_layer * (min(context, layer.window) if layer.window else context) for layer in config.layers
        )
        return self.weight_bytes * weights + batch * kv

    @property
    def _head_params(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def _layer_params(self, layer: LayerConfig, *, chosen_only: bool) -> int:
        config = self.config
        heads = config.num_heads + 2 * config.num_kv_heads
        attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
        if not layer.is_moe or config.moe is None:
            return attention + 3 * config.hidden_size * config.intermediate_size
        experts = config.moe.num_chosen if chosen_only else config.moe.num_experts
        mlp = 3 * config.hidden_size * config.moe.intermediate_size * experts
        return attention + mlp + config.hidden_size * config.moe.num_experts
