"""Gather and scatter against plain loops over logical indices; sentinels everywhere else."""

from __future__ import annotations

import itertools
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import CacheShape, KVCache
from kvtransfer.contract import KvFormat
from kvtransfer.scatter import format_of, gather, scatter
from kvtransfer.wire import Frame
from tests.kvtransfer.rig import make_cache, plan_frames

torch.set_num_threads(1)

SENTINEL = -9.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def strided(cache: KVCache, order: tuple[int, ...], pad: int) -> KVCache:
    """The same cache over other memory: dimensions stored in another order, with gaps between heads' rows.

    order: which logical dimension (N, L, 2, H, S, D) comes where in storage.
    """
    sizes = list(cache.logical.shape)
    stored = [sizes[dim] + (pad if dim == order[-1] else 0) for dim in order]
    strides = [0] * 6
    step = 1
    for dim, size in zip(reversed(order), reversed(stored), strict=True):
        strides[dim], step = step, step * size
    storage = torch.full((step,), SENTINEL, dtype=cache.logical.dtype)
    cache.logical = storage.as_strided(sizes, strides)
    return cache


def element(value: float, dtype: torch.dtype) -> float:
    """A float32 value as another dtype stores it, by bit arithmetic; saturating at float16's end."""
    if dtype == torch.float32 or value != value:  # noqa: PLR0124 - NaN
        return value
    if dtype == torch.bfloat16:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        bits += 0x7FFF + (bits >> 16 & 1)
        return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])
    with np.errstate(over="ignore"):
        half = float(np.float16(value))
    return half if np.isfinite(half) or not np.isfinite(value) else float(np.copysign(65504.0, value))


Side = tuple[KVCache, list[int]]  # a cache and the blocks of the sequence in it


def expected(source_side: Side, target_side: Side, tokens: range) -> torch.Tensor:
    """The target's logical content after the transfer, written element by element."""
    (source, source_ids), (target, target_ids) = source_side, target_side
    data = source.logical.float().tolist()
    result = torch.full(target.logical.shape, SENTINEL).tolist()
    _, layers, _, heads, target_size, dims = target.logical.shape
    source_size = source.logical.shape[4]
    for token in tokens:
        source_block, source_slot = source_ids[token // source_size], token % source_size
        target_block, target_slot = target_ids[token // target_size], token % target_size
        for layer, kv, head, dim in itertools.product(range(layers), range(2), range(heads), range(dims)):
            value = data[source_block][layer][kv][head][source_slot][dim]
            result[target_block][layer][kv][head][target_slot][dim] = element(value, target.logical.dtype)
    return torch.tensor(result)


def transfer(
    source_side: Side,
    target_side: Side,
    num_tokens: int,
    *,
    num_held_tokens: int = 0,
    max_frame_bytes: int = 1 << 20,
) -> int:
    (source, source_ids), (target, target_ids) = source_side, target_side
    fmt = format_of(source.shape)
    frames = plan_frames(
        fmt, num_tokens=num_tokens, num_held_tokens=num_held_tokens, max_frame_bytes=max_frame_bytes
    )
    num_saturated = 0
    for spec in frames:
        frame = Frame(spec, gather(source, fmt, source_ids, spec))
        num_saturated += scatter(target, fmt, target_ids, frame, num_held_tokens=num_held_tokens)
    return num_saturated


ORDERS = {"as_built": None, "kv_split": (2, 1, 0, 4, 3, 5), "heads_first": (3, 0, 2, 1, 4, 5)}
KINDS = st.tuples(
    st.sampled_from(list(DTYPES)), st.sampled_from(["HND", "NHD"]), st.sampled_from(list(ORDERS))
)


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.tuples(st.integers(0, 2**32), st.integers(1, 75), st.floats(0, 1)),
    sizes=st.sampled_from([(16, 16), (16, 32), (32, 16), (7, 16), (16, 5), (1, 3)]),
    kinds=st.tuples(KINDS, KINDS),
    max_frame_bytes=st.sampled_from([1, 900, 5000, 1 << 20]),
)
def test_every_element_arrives_by_logical_index_and_nothing_else_is_touched(
    numbers: tuple[int, int, float],
    sizes: tuple[int, int],
    kinds: tuple[tuple[str, str, str], tuple[str, str, str]],
    max_frame_bytes: int,
) -> None:
    seed, num_tokens, held = numbers
    rng = random.Random(seed)
    caches, ids = [], []
    for size, (dtype, layout, order) in zip(sizes, kinds, strict=True):
        num_blocks = -(-num_tokens // size)
        cache = make_cache(
            num_blocks + 2,
            block_size=size,
            dtype=DTYPES[dtype],
            layout=layout,
            num_layers=3,
            num_kv_heads=2,
            head_dim=3,
        )
        storage_order = ORDERS[order]
        caches.append(cache if storage_order is None else strided(cache, storage_order, pad=3))
        ids.append(rng.sample(range(num_blocks + 2), num_blocks))
    source, target = caches
    generator = torch.Generator().manual_seed(seed)
    source.logical.copy_(torch.randn(source.logical.shape, generator=generator) * 100)
    target.logical.fill_(SENTINEL)
    num_held_tokens = int(held * num_tokens)
    sides = ((source, ids[0]), (target, ids[1]))
    transfer(*sides, num_tokens, num_held_tokens=num_held_tokens, max_frame_bytes=max_frame_bytes)
    want = expected(*sides, range(num_held_tokens, num_tokens))
    torch.testing.assert_close(target.logical.float(), want, rtol=0, atol=0)


def test_blocks_5_2_9_move_into_0_7_3_between_caches_of_foreign_strides() -> None:
    source = strided(make_cache(10, layout="NHD"), (2, 1, 0, 4, 3, 5), pad=0)
    target = strided(make_cache(10), (3, 0, 2, 1, 4, 5), pad=1)
    count = source.logical.numel()
    source.logical.copy_(torch.arange(count, dtype=torch.float32).view(source.logical.shape))
    target.logical.fill_(SENTINEL)
    transfer((source, [5, 2, 9]), (target, [0, 7, 3]), 48)
    assert torch.equal(target.logical[[0, 7, 3]], source.logical[[5, 2, 9]])
    others = [1, 2, 4, 5, 6, 8, 9]
    assert bool((target.logical[others] == SENTINEL).all())


def test_values_beyond_float16_saturate_and_are_counted_but_nan_and_infinity_stay() -> None:
    source = make_cache(1, block_size=2, num_layers=1, num_kv_heads=1, head_dim=3)
    target = make_cache(1, block_size=2, num_layers=1, num_kv_heads=1, head_dim=3, dtype=torch.float16)
    keys = [[65504.0, 65519.0, 65520.0], [-1e9, float("inf"), float("-inf")]]
    values = [[float("nan"), 1.0, -65504.0], [-65520.0, 3.4e38, 0.0]]
    source.keys(0)[0, 0] = torch.tensor(keys)
    source.values(0)[0, 0] = torch.tensor(values)
    # 65520 and above round to infinity in float16 (its largest value is 65504, the next step 32 wide).
    assert transfer((source, [0]), (target, [0]), 2) == 4
    inf = float("inf")
    assert target.keys(0)[0, 0].tolist() == [[65504.0, 65504.0, 65504.0], [-65504.0, inf, -inf]]
    assert target.values(0)[0, 0, 0, 1:].tolist() == [1.0, -65504.0]
    assert bool(target.values(0)[0, 0, 0, 0].isnan())
    assert target.values(0)[0, 0, 1].tolist() == [-65504.0, 65504.0, 0.0]


def test_bfloat16_beyond_float16_saturates_too() -> None:
    source = make_cache(1, block_size=1, num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.bfloat16)
    target = make_cache(1, block_size=1, num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float16)
    source.keys(0)[0, 0, 0] = torch.tensor([65280.0, 65536.0])
    assert transfer((source, [0]), (target, [0]), 1) == 1
    assert target.keys(0)[0, 0, 0].tolist() == [65280.0, 65504.0]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_payload_is_the_blocks_in_the_caches_own_order(layout: str) -> None:
    cache = make_cache(4, layout=layout)
    cache.data.copy_(torch.arange(cache.data.numel(), dtype=torch.float32).view(cache.data.shape))
    fmt = format_of(cache.shape)
    (spec,) = plan_frames(fmt, num_tokens=30)
    payload = gather(cache, fmt, [3, 1], spec)
    assert bytes(payload) == cache.data[3].numpy().tobytes() + cache.data[1].numpy().tobytes()


def test_the_format_names_what_the_cache_is() -> None:
    shape = CacheShape(
        num_blocks=9,
        num_layers=4,
        num_kv_heads=2,
        block_size=32,
        head_dim=64,
        dtype=torch.bfloat16,
        layout="NHD",
    )
    fmt = KvFormat(dtype="bfloat16", layout="NHD", block_size=32, num_layers=4, num_kv_heads=2, head_dim=64)
    assert format_of(shape) == fmt
    assert fmt.layer_block_bytes * 4 == shape.bytes_per_block
