"""Layouts, views and memory limits of the paged cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton.errors import ConfigError
from engine import kv_cache
from engine.kv_cache import CacheShape, KVCache

SHAPE = CacheShape(
    num_blocks=5, num_layers=3, num_kv_heads=2, block_size=4, head_dim=6, dtype=torch.bfloat16, layout="HND"
)


def test_sizes_follow_the_formula() -> None:
    # 2 (K and V) x 3 layers x 2 heads x 6 elements x 2 bytes = 144 bytes a token.
    assert SHAPE.bytes_per_token == 144
    assert SHAPE.bytes_per_block == 576
    assert SHAPE.num_bytes == 2880


def test_256_tokens_of_llama_2_7b_take_134_megabytes() -> None:
    # 256 x 2 (K and V) x 32 layers x 32 heads x 128 elements x 2 bytes = 134,217,728.
    shape = CacheShape(
        num_blocks=16, num_layers=32, num_kv_heads=32, block_size=16, head_dim=128, dtype=torch.bfloat16
    )
    assert shape.num_bytes == 134_217_728


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_views_show_one_logical_order_over_both_layouts(layout: str) -> None:
    cache = KVCache(dataclasses.replace(SHAPE, layout=layout))
    cache.logical.copy_(torch.arange(cache.logical.numel()).view(cache.logical.shape) % 251)

    element = cache.logical[4, 1, 1, 0, 3, 5]
    inner = (0, 3) if layout == "HND" else (3, 0)
    assert cache.data[4, 1, 1, inner[0], inner[1], 5] == element
    assert cache.values(1)[4, 0, 3, 5] == element
    assert cache.layer(1)[4, 1, 0, 3, 5] == element
    assert cache.keys(1).shape == (5, 2, 4, 6)
    assert cache.values(2).data_ptr() - cache.data.data_ptr() == (2 * 2 + 1) * 2 * 4 * 6 * 2


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_block_of_all_layers_is_one_run_of_bytes(layout: str) -> None:
    cache = KVCache(dataclasses.replace(SHAPE, layout=layout))

    assert cache.data[3].is_contiguous()
    assert cache.data[3].nbytes == SHAPE.bytes_per_block


def test_a_cache_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda _device: SHAPE.num_bytes - 1)

    with pytest.raises(ConfigError, match="needs 2880 bytes on cpu, but only 2879 are free") as raised:
        KVCache(SHAPE)

    assert raised.value.field == "kv_cache_bytes"


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="HND or NHD"):
        KVCache(dataclasses.replace(SHAPE, layout="DNH"))
