"""The operators of a model that vendors have too, each against theirs over rising numbers of tokens.

A matrix product or an attention of the vendor's may be faster where it is short, or where it is long; see
engine/kernels/tuning.py, which runs the contests. Weights and prompts are random. Tokens are those of a step
for embed_rms_norm_qkv, and those of one prompt for prefill_attention.

Shape suffixes: T tokens, V vocabulary, D hidden, O outputs of the qkv product, H query heads, K kv heads,
N all heads of q, k and v, or the cache's blocks, b block_size, h head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from baton.model_config import ModelConfig
from engine.kernels.add_rms_norm import add_rms_norm
from engine.kernels.choices import Choices
from engine.kernels.embed_rms_norm_qkv import embed_rms_norm_qkv
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.sequences import Sequences
from engine.kernels.tuning import Contest, Sides
from engine.kv_cache import CacheShape, KVCache

EMBED_RMS_NORM_QKV = "embed_rms_norm_qkv"
PREFILL_ATTENTION = "prefill_attention"
# Rows of the embedding: enough for all tokens of a step to differ.
_NUM_ROWS = 4096


def model_contests(
    config: ModelConfig, cache: CacheShape, dtype: torch.dtype, device: torch.device
) -> tuple[Contest, ...]:
    """cache: its number of blocks and layers does not matter.  dtype: the weights'."""
    return (
        Contest(
            op=EMBED_RMS_NORM_QKV,
            shape=(
                ("width", config.hidden_size),
                ("outputs", (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
                ("bias", int(config.attention_bias)),
                ("dtype", _name(dtype)),
            ),
            sides=partial(_embed_sides, config, dtype, device),
        ),
        Contest(
            op=PREFILL_ATTENTION,
            shape=(
                ("num_heads", config.num_heads),
                ("num_kv_heads", config.num_kv_heads),
                ("head_dim", config.head_dim),
                ("block_size", cache.block_size),
                ("layout", cache.layout),
                ("dtype", _name(dtype)),
                ("kv_dtype", _name(cache.dtype)),
            ),
            sides=partial(_attention_sides, config, cache, dtype, device),
        ),
    )


def _embed_sides(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_tokens: int, choices: Choices
) -> Sides:
    """The kernel, and an embedding, a norm and a matrix product."""
    width, eps, scale = config.hidden_size, config.rms_norm_eps, config.embedding_scale
    num_outputs = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token_ids_T = torch.arange(num_tokens, device=device) * 7919 % _NUM_ROWS
    embedding_VD = torch.randn(_NUM_ROWS, width, dtype=dtype, device=device)
    weight_D = torch.ones(width, device=device)
    qkv_OD = torch.randn(num_outputs, width, dtype=dtype, device=device)
    bias_O = torch.zeros(num_outputs, dtype=dtype, device=device) if config.attention_bias else None

    def vendor() -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TD = embedding_VD[token_ids_T].float() * scale
        normed_TD = add_rms_norm(hidden_TD, None, weight_D, eps, dtype=dtype, choices=choices)
        return hidden_TD, functional.linear(normed_TD, qkv_OD, bias_O)

    kernel = partial(
        embed_rms_norm_qkv,
        token_ids_T,
        embedding_VD,
        weight_D,
        eps,
        qkv_OD,
        bias_O,
        embedding_scale=scale,
        choices=choices,
    )
    return kernel, vendor


def _attention_sides(
    config: ModelConfig,
    cache: CacheShape,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int,
    choices: Choices,
) -> Sides:
    """The kernel, which reads the cache, and torch's fused operator on the product's keys and values.

    One prompt from its first token on, without a window. The vendor's way with a cached prefix gathers it
    first, which no prompt without one should pay for.
    """
    num_heads, num_kv_heads, scale = config.num_heads, config.num_kv_heads, config.attention_scale
    qkv_TNh = torch.randn(
        num_tokens, num_heads + 2 * num_kv_heads, config.head_dim, dtype=dtype, device=device
    )
    q_THh, kv_T2Kh = qkv_TNh[:, :num_heads], qkv_TNh[:, num_heads:].view(num_tokens, 2, num_kv_heads, -1)
    num_blocks = -(-num_tokens // cache.block_size)
    cache_N2Kbh = KVCache(replace(cache, num_blocks=num_blocks, num_layers=1), device).layer(0)
    slots_T = torch.arange(num_tokens, device=device)
    cache_N2Kbh[slots_T // cache.block_size, :, :, slots_T % cache.block_size] = kv_T2Kh.to(cache.dtype)
    start, length = np.array([0], np.int32), np.array([num_tokens], np.int32)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    sequences = Sequences.of_arrays(start, length, length, table, device)
    out_THh = torch.empty_like(q_THh, memory_format=torch.contiguous_format)

    def kernel() -> torch.Tensor:
        prefill_attention(q_THh, cache_N2Kbh, sequences, out_THh, scale=scale, choices=choices)
        return out_THh

    def vendor() -> torch.Tensor:
        q_1HTh, k_1KTh, v_1KTh = (part[None].transpose(1, 2) for part in (q_THh, *kv_T2Kh.unbind(1)))
        return functional.scaled_dot_product_attention(
            q_1HTh, k_1KTh, v_1KTh, is_causal=True, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)

    return kernel, vendor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
