"""Frames of made-up tokens, caches of any stride to write them into, and what must then be where.

Owns the numbers: a value of its own for every element, and what each element type makes of it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from hypothesis import strategies as st

from engine.kv_cache import KVCache
from kvtransfer.contract import KvFormat, Layout
from kvtransfer.conversion import DTYPES
from kvtransfer.scatter import format_of
from kvtransfer.wire import Frame, FrameSpec
from tests.kvtransfer.elements import stored, to_bytes
from tests.kvtransfer.rig import make_cache

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

    def frame(self, index: int, blocks: range, layers: range, *, layers_first: bool = False) -> Frame:
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
        outer = [(block, layer) for block in blocks for layer in layers]
        if layers_first:
            outer = [(block, layer) for layer in layers for block in blocks]
        payload = b"".join(self._elements(outer))
        # Not where an element would lie in an array: a transport may put it anywhere.
        return Frame(spec, memoryview(b"x" + payload)[1:], layers_first)

    def _elements(self, outer: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        size, dtype = self.fmt.block_size, self.fmt.dtype
        # Beyond the last token lies what must neither arrive nor be counted.
        junk = b"\x66" * len(to_bytes(0.0, dtype))
        inner = [range(HEADS), range(size)] if self.fmt.layout == "HND" else [range(size), range(HEADS)]
        for (block, layer), kv, a, b, dim in product(outer, range(2), *inner, range(DIMS)):
            head, slot = (a, b) if self.fmt.layout == "HND" else (b, a)
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
