"""Frames into caches, against plain loops over logical indices; sentinels everywhere else."""

from __future__ import annotations

import math
import random
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.limits import blocks_needed
from engine.kv_cache import CacheShape
from kvtransfer.contract import KvFormat, Layout
from kvtransfer.scatter import BlockWriter, block_runs, format_of
from kvtransfer.wire import Frame, FrameSpec
from tests.kvtransfer.sent_tokens import (
    BLOCK_SIZES,
    DIMS,
    HEADS,
    KINDS,
    LAYERS,
    ORDERS,
    SENTINEL,
    SentTokens,
    cuts,
    expected,
    has_clean_gaps,
    source_format,
    target_cache,
)

torch.set_num_threads(1)


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 120),
    held=st.one_of(st.just(0.0), st.floats(0, 1)),
    block_sizes=BLOCK_SIZES,
    kinds=st.tuples(KINDS, KINDS),
    order=st.sampled_from(list(ORDERS)),
    has_large=st.booleans(),
)
def test_every_element_arrives_by_logical_index_and_nothing_else_is_touched(
    *,
    seed: int,
    num_tokens: int,
    held: float,
    block_sizes: tuple[int, int],
    kinds: tuple[tuple[str, Layout], tuple[str, Layout]],
    order: str,
    has_large: bool,
) -> None:
    rng = random.Random(seed)
    sent = SentTokens(
        fmt=source_format(block_sizes[0], *kinds[0]), num_tokens=num_tokens, has_large=has_large
    )
    num_blocks = blocks_needed(num_tokens, block_sizes[1])
    cache = target_cache(num_blocks + 2, block_sizes[1], *kinds[1], order)
    ids = rng.sample(range(num_blocks + 2), num_blocks)
    num_held_tokens = int(held * num_tokens)
    blocks = range(num_held_tokens // block_sizes[0], blocks_needed(num_tokens, block_sizes[0]))
    parts = list(product(cuts(rng, blocks.start, blocks.stop), cuts(rng, 0, LAYERS)))
    rng.shuffle(parts)
    writer = BlockWriter(cache)
    num_saturated = sum(
        writer.write(
            sent.fmt,
            ids,
            sent.frame(index, *part, layers_first=rng.random() < 0.5),
            num_held_tokens=num_held_tokens,
        )
        for index, part in enumerate(parts)
    )
    want, num_large = expected(sent, cache, ids, range(num_held_tokens, num_tokens))
    torch.testing.assert_close(cache.logical.float(), want, rtol=0, atol=0)
    assert num_saturated == num_large
    assert has_clean_gaps(cache)


@given(sizes=BLOCK_SIZES, ends=st.tuples(st.integers(0, 3000), st.integers(0, 3000)))
def test_runs_hold_every_token_once_and_are_few(sizes: tuple[int, int], ends: tuple[int, int]) -> None:
    tokens = range(min(ends), max(ends))
    runs = list(block_runs(tokens, *sizes))
    held = [token for firsts, count in runs for first in firsts for token in range(first, first + count)]
    assert sorted(held) == list(tokens)
    num_slots = sum(sizes) // math.gcd(*sizes)  # borders of both sides in lcm(sizes) tokens
    assert len(runs) <= num_slots + 1


def test_equal_sizes_and_doubles_need_as_many_runs_as_there_are_slots() -> None:
    assert list(block_runs(range(320), 16, 16)) == [(range(0, 320, 16), 16)]
    doubles = [(range(0, 320, 32), 16), (range(16, 320, 32), 16)]
    assert list(block_runs(range(320), 16, 32)) == doubles
    assert list(block_runs(range(320), 32, 16)) == doubles


def test_blocks_5_2_9_move_into_0_7_3_of_a_cache_with_foreign_strides() -> None:
    payload = torch.arange(10 * LAYERS * 2 * HEADS * 16 * DIMS, dtype=torch.float32)
    source = payload.view(10, LAYERS, 2, 16, HEADS, DIMS)  # a prefill worker's blocks, tokens before heads
    cache = target_cache(10, 16, "float32", "HND", "heads_outermost")
    spec = FrameSpec(index=0, first_block=0, num_blocks=3, num_tokens=48, first_layer=0, num_layers=LAYERS)
    frame = Frame(spec, memoryview(source[[5, 2, 9]].numpy().tobytes()))
    assert BlockWriter(cache).write(source_format(16, "float32", "NHD"), [0, 7, 3], frame) == 0
    assert torch.equal(cache.logical[[0, 7, 3]], source[[5, 2, 9]].transpose(3, 4))
    assert bool((cache.logical[[1, 2, 4, 5, 6, 8, 9]] == SENTINEL).all())
    assert has_clean_gaps(cache)


def test_layers_come_first_where_the_frame_says_so() -> None:
    source = torch.arange(3 * LAYERS * 2 * HEADS * 16 * DIMS, dtype=torch.float32)
    source = source.view(LAYERS, 3, 2, HEADS, 16, DIMS)
    cache = target_cache(4, 16, "float32", "NHD", "as_built")
    spec = FrameSpec(index=0, first_block=0, num_blocks=3, num_tokens=48, first_layer=0, num_layers=LAYERS)
    frame = Frame(spec, memoryview(source.numpy().tobytes()), layers_first=True)
    assert BlockWriter(cache).write(source_format(16, "float32", "HND"), [3, 0, 2], frame) == 0
    assert torch.equal(cache.logical[[3, 0, 2]], source.transpose(0, 1))


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
