"""What a step of a model computes and reads at the least, by formula.

    P_lin = L * (D * (H + 2K) * h + H * h * D + 3 * D * F);  P = P_lin + V * D, twice unless they are tied
    prefill FLOP = 2 * P_lin * S + 2 * L * H * h * S^2 + 2 * V * D, of each prompt of S tokens
    decode bytes = w * P + 2 * L * K * h * c * context, of all sequences

L layers, D hidden, F intermediate, H query heads, K kv heads, h head_dim, V vocabulary; w, c bytes of a
weight and of an element of the cache. Causal attention computes half of a square.
"""

from __future__ import annotations

from baton.model_config import ModelConfig
from engine.kernels.model_launches import Step


def prefill_flops(config: ModelConfig, step: Step) -> float:
    """Of prompts without anything cached."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * step.new_tokens**2
    head = 2 * config.vocab_size * config.hidden_size
    return float(step.num_sequences * (2 * _linear(config) * step.new_tokens + attention + head))


def decode_bytes(config: ModelConfig, step: Step, itemsize: int) -> float:
    """Of sequences with one new token each. itemsize: of weights, and of the cache."""
    tables = 1 if config.tie_word_embeddings else 2
    weights = _linear(config) + tables * config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * step.num_sequences * step.context
    return float(itemsize * (weights + kv))


def _linear(config: ModelConfig) -> int:
    attended = config.num_heads * config.head_dim
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    of_layer = heads + attended + 3 * config.intermediate_size
    return config.num_layers * config.hidden_size * of_layer
