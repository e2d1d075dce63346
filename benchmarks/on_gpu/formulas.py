"""What a step of a model computes and reads at the least, by formula.

    P_lin = L * (D * (H + 2K) * h + H * h * D + 3 * D * F)
    prefill FLOP = 2 * P_lin * S + 2 * L * H * h * S^2 + 2 * V * D, of each prompt of S tokens
    decode bytes = w * (P_lin + V * D + B * D) + 2 * L * K * h * c * context, of all B sequences

L layers, D hidden, F intermediate, H query heads, K kv heads, h head_dim, V vocabulary; w, c bytes of a
weight and of an element of the cache. Causal attention computes half of a square. Of the embedding a step
reads a row for each sequence, and the head whole, whether they are the same weights or not.
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
    weights = _linear(config) + (config.vocab_size + step.num_sequences) * config.hidden_size
    return float(itemsize * weights + kv_bytes(config, step, itemsize))


def kv_bytes(config: ModelConfig, step: Step, itemsize: int) -> float:
    """That the cache holds of a step's sequences."""
    num_elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return float(itemsize * num_elements * step.num_sequences * step.context)


def weight_bytes(config: ModelConfig, itemsize: int) -> float:
    """That the model holds."""
    tables = 1 if config.tie_word_embeddings else 2
    return float(itemsize * (_linear(config) + tables * config.vocab_size * config.hidden_size))


def _linear(config: ModelConfig) -> int:
    attended = config.num_heads * config.head_dim
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    of_layer = heads + attended + 3 * config.intermediate_size
    return config.num_layers * config.hidden_size * of_layer
