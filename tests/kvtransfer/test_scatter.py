"""Frames into caches, against plain loops over logical indices; sentinels everywhere else."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.limits import blocks_needed
from engine.kv_cache import CacheShape, KVCache
from kvtransfer.contract import KvFormat, Layout
from kvtransfer.conversion import DTYPES
from kvtransfer.scatter import BlockWriter, block_runs, format_of
from kvtransfer.wire import Frame, FrameSpec
from tests.kvtransfer.elements import stored, to_bytes
from tests.kvtransfer.rig import make_cache

torch.set_num_threads(1)

SENTINEL = -9.0
LAYERS, HEADS, DIMS = 2, 2, 3
# Which logical dimension (N, L, 2, H, S, D) comes where in storage; None for a cache as it is built.
ORDERS = {
    "as_built": None,
    "kv_split": (2, 1, 0, 4, 3, 5),
    "kv_split_heads_first": (2, 0, 1, 3, 4, 5),
    "heads_outermost": (3, 0, 2, 1, 4, 5),
    "dims_apart": (0, 5, 1, 2, 3, 4),
}


def strided(cache: KVCache, order: tuple[int, ...] | None, pad: int) -> KVCache:
    """The same cache over other memory: dimensions stored in another order, with gaps of sentinels."""
    if order is None:
        return cache
    sizes = list(cache.logical.shape)
    extents = [sizes[dim] + (pad if dim == order[-1] else 0) for dim in order]
    strides = [0] * 6
    step = 1
    for dim, size in zip(reversed(order), reversed(extents), strict=True):
        strides[dim], step = step, step * size
    storage = torch.full((step,), SENTINEL, dtype=cache.logical.dtype)
    cache.logical = storage.as_strided(sizes, strides)
    return cache


@dataclass(frozen=True, kw_only=True)
class SentTokens:
    """What a sender has in its format; some values are beyond float16 if has_large."""

    fmt: KvFormat
    num_tokens: int
    has_large: bool = False

    def value(self, token: int, layer: int, kv: int, head: int, dim: int) -> float:
        """A value of its own for every element, exact in the dtype.

        In bits, counted up from the smallest normal float16; a float32 has bits that the others lack.
        """
        index = (((token * LAYERS + layer) * 2 + kv) * HEADS + head) * DIMS + dim
        bits = (0x3880 + index // 2) << 16 | (index % 2) << 31
        if self.fmt.dtype == "float32":
            bits |= index * 7919 & 0xFFFF
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
        is_large = self.has_large and index % 7 == 0 and self.fmt.dtype != "float16"
        return float(value) * (2.0**40 if is_large else 1.0)

    def frame(self, index: int, blocks: range, layers: range) -> Frame:
        start = blocks.start * self.fmt.block_size
        num_tokens = min(self.num_tokens, blocks.stop * self.fmt.block_size) - start
        spec = FrameSpec(
            index=index,
            first_block=blocks.start,
            num_blocks=len(blocks),
            num_tokens=num_tokens,
            first_layer=layers.start,
            num_layers=len(layers),
        )
        payload = b"".join(self._elements(blocks, layers))
        # Not where an element would lie in an array: a transport may put it anywhere.
        return Frame(spec, memoryview(b"x" + payload)[1:])

    def _elements(self, blocks: range, layers: range) -> Iterator[bytes]:
        size, dtype = self.fmt.block_size, self.fmt.dtype
        # Beyond the last token lies what must neither arrive nor be counted.
        junk = b"\x66" * len(to_bytes(0.0, dtype))
        inner = [range(HEADS), range(size)] if self.fmt.layout == "HND" else [range(size), range(HEADS)]
        for block, layer, kv, outer, middle, dim in product(blocks, layers, range(2), *inner, range(DIMS)):
            head, slot = (outer, middle) if self.fmt.layout == "HND" else (middle, outer)
            token = block * size + slot
            known = token < self.num_tokens
            yield to_bytes(self.value(token, layer, kv, head, dim), dtype) if known else junk


def expected(sent: SentTokens, target: KVCache, ids: list[int], tokens: range) -> tuple[torch.Tensor, int]:
    """The target's logical content afterwards and the saturated values, element by element."""
    result = torch.full(target.logical.shape, SENTINEL).tolist()
    dtype = format_of(target.shape).dtype
    num_saturated = 0
    for token, layer, kv, head, dim in product(tokens, range(LAYERS), range(2), range(HEADS), range(DIMS)):
        block, slot = divmod(token, target.shape.block_size)
        value = sent.value(token, layer, kv, head, dim)
        result[ids[block]][layer][kv][head][slot][dim] = stored(value, dtype)
        num_saturated += dtype == "float16" and abs(value) >= 65520
    return torch.tensor(result), num_saturated


def target_cache(num_blocks: int, block_size: int, dtype: str, layout: str, order: str) -> KVCache:
    cache = make_cache(
        num_blocks,
        block_size=block_size,
        dtype=DTYPES[dtype],
        layout=layout,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIMS,
    )
    cache = strided(cache, ORDERS[order], pad=3)
    cache.logical.fill_(SENTINEL)
    return cache


def has_clean_gaps(cache: KVCache) -> bool:
    """Whether everything between the elements of the cache still is a sentinel; ends the cache."""
    cache.logical.fill_(SENTINEL)
    storage = torch.empty(0, dtype=cache.logical.dtype).set_(cache.logical.untyped_storage())
    return bool((storage == SENTINEL).all())


def cuts(rng: random.Random, first: int, end: int) -> list[range]:
    """first..end in one to three parts."""
    borders = sorted({first, end, *(rng.randint(first, end) for _ in range(rng.randrange(3)))})
    return [range(*pair) for pair in pairwise(borders)]


def source_format(block_size: int, dtype: str, layout: Layout) -> KvFormat:
    return KvFormat(
        dtype=dtype,
        layout=layout,
        block_size=block_size,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIMS,
    )


LAYOUTS: tuple[Layout, ...] = ("HND", "NHD")
KINDS = st.tuples(st.sampled_from(list(DTYPES)), st.sampled_from(LAYOUTS))
BLOCK_SIZES = st.one_of(
    st.sampled_from([(16, 16), (16, 32), (32, 16), (16, 5), (33, 32), (1, 3), (4, 6), (8, 2)]),
    st.tuples(st.integers(1, 33), st.integers(1, 33)),
)


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 120),
    held=st.one_of(st.just(0.0), st.floats(0, 1)),
    block_sizes=BLOCK_SIZES,
    kinds=st.tuples(KINDS, KINDS),
    order=st.sampled_from(list(ORDERS)),
    has_large=st.booleans(),
    is_on_host=st.sampled_from([True, True, True, False]),
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
    is_on_host: bool,
) -> None:
    rng = random.Random(seed)
    sent = SentTokens(
        fmt=source_format(block_sizes[0], *kinds[0]), num_tokens=num_tokens, has_large=has_large
    )
    num_blocks = blocks_needed(num_tokens, block_sizes[1])
    cache = target_cache(num_blocks + 2, block_sizes[1], *kinds[1], order)
    if not is_on_host:
        cache.device = torch.device("cuda")  # its way to write, with the memory here
    ids = rng.sample(range(num_blocks + 2), num_blocks)
    num_held_tokens = int(held * num_tokens)
    blocks = range(num_held_tokens // block_sizes[0], blocks_needed(num_tokens, block_sizes[0]))
    parts = list(product(cuts(rng, blocks.start, blocks.stop), cuts(rng, 0, LAYERS)))
    rng.shuffle(parts)
    writer = BlockWriter(cache)
    num_saturated = sum(
        writer.write(sent.fmt, ids, sent.frame(index, *part), num_held_tokens=num_held_tokens)
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
