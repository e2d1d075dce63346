"""How large the cache of an engine is, and into which blocks it is cut: decided once, at start.

Owns the decision. It allocates nothing (engine/kv_cache.py) and hands out nothing (engine/block_pool.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from baton.errors import ConfigError
from baton.limits import blocks_needed
from baton.model_config import ModelConfig
from engine.block_size import choose_block_size
from engine.config import EngineConfig
from engine.kv_cache import CacheShape

# Taken where the free memory cannot be known.
UNKNOWN_MEMORY_BYTES = 1 << 30


def plan_cache(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, available_bytes: int | None
) -> CacheShape:
    """The shape of an engine's cache.

    dtype: of keys and values. available_bytes: memory free on the device once the weights are
        there; None if that cannot be known.
    An explicit kv_cache_bytes is taken as it is. Else the cache gets kv_memory_fraction of what is free, but
    no more than max_running sequences of full length need.
    Raises ConfigError if it cannot hold one block, or one chunk of a prompt.
    """
    shape = one_block(config, model, dtype)
    budget_bytes, origin = _budget(config, available_bytes)
    num_blocks = budget_bytes // shape.bytes_per_block
    if not config.kv_cache_bytes:
        most = config.max_running * blocks_needed(model.max_model_len, shape.block_size)
        num_blocks = min(num_blocks, most)
    _check_holds_a_chunk(shape.with_blocks(num_blocks), min(config.chunk_tokens, model.max_model_len), origin)
    return shape.with_blocks(num_blocks)


def one_block(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> CacheShape:
    """A cache of one block, of the size that the engine takes."""
    shape = CacheShape(
        num_blocks=1,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        block_size=1,
        head_dim=model.head_dim,
        dtype=dtype,
        layout=config.layout,
    )
    expected_tokens = min(config.expected_tokens, model.max_model_len)
    chosen = config.block_size or choose_block_size(shape.bytes_per_token, expected_tokens)
    return replace(shape, block_size=chosen)


def _budget(config: EngineConfig, available_bytes: int | None) -> tuple[int, str]:
    """Bytes the cache may have, and where the number comes from, in words."""
    if config.kv_cache_bytes:
        return config.kv_cache_bytes, f"kv_cache_bytes is {config.kv_cache_bytes}"
    if available_bytes is None:
        return UNKNOWN_MEMORY_BYTES, f"kv_cache_bytes is automatic, {UNKNOWN_MEMORY_BYTES} here"
    budget_bytes = int(available_bytes * config.kv_memory_fraction)
    share = f"{config.kv_memory_fraction:g} of {available_bytes} free bytes"
    return budget_bytes, f"kv_cache_bytes is automatic, {share} is {budget_bytes}"


def _check_holds_a_chunk(shape: CacheShape, chunk_tokens: int, origin: str) -> None:
    if shape.num_blocks < 1:
        raise ConfigError(
            f"{origin}; one block of this model needs {shape.bytes_per_block} bytes", field="kv_cache_bytes"
        )
    needed = blocks_needed(chunk_tokens, shape.block_size)
    if shape.num_blocks < needed:
        raise ConfigError(
            f"{origin}; a chunk of {chunk_tokens} tokens needs {needed * shape.bytes_per_block} bytes",
            field="kv_cache_bytes",
        )
