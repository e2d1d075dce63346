"""Moving KV from the payload of a frame into a paged cache in host memory.

Owns the mapping (block, slot) <-> (token of the sequence), across layouts and block
sizes; element types are kvtransfer/conversion.py's. Must not know leases, streams or time.

Writing goes through the cache's logical view, so real strides are obeyed whatever the
storage looks like. A cache on a device is kvtransfer/device_writer.py's.

Shape suffixes: N blocks, L layers, T the two of keys and values, H kv heads, S slots of a
block, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any, TypeVar, cast

import numpy as np
import torch

from engine.kv_cache import CacheShape, KVCache
from kvtransfer.contract import KvFormat, Layout
from kvtransfer.conversion import DTYPES, Bits, Conversion
from kvtransfer.wire import Frame, FrameSpec

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INTEGERS = {2: torch.int16, 4: torch.int32}
Values = TypeVar("Values", Bits, torch.Tensor)


def format_of(shape: CacheShape) -> KvFormat:
    """How a cache of that shape appears on the wire."""
    return KvFormat(
        dtype=_DTYPE_NAMES[shape.dtype],
        layout=cast(Layout, shape.layout),
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


class BlockWriter:
    """Writes received frames into one cache. Not for use by two threads at once.

    Through numpy: on one thread, and measured about twice as fast as by torch's indexing.
    """

    def __init__(self, cache: KVCache) -> None:
        self._conversion = Conversion(cache.shape.dtype)
        self._target_NLTHSD = _in_rows(cache.logical.view(_INTEGERS[cache.shape.dtype.itemsize]).numpy())

    def write(
        self, fmt: KvFormat, block_ids: Sequence[int], frame: Frame, *, num_held_tokens: int = 0
    ) -> int:
        """Writes a verified frame into the cache, converting as needed.

        fmt: the sender's format. block_ids: all blocks of the sequence, owned by the
        lease. Leading num_held_tokens are already there and stay untouched, as does
        every slot that holds no token of the frame. Returns how many of the written
        values exceeded float16 and were saturated.
        """
        spec = frame.spec
        start = spec.first_block * fmt.block_size
        tokens = range(max(start, num_held_tokens), start + spec.num_tokens)
        bits, excess = self._conversion.convert(frame.payload, fmt.dtype)
        self._spread(logical(bits, fmt, frame).view(self._target_NLTHSD.dtype), block_ids, spec, tokens)
        if excess is None:
            return 0
        excess_NS = logical(excess, fmt, frame).sum(axis=(1, 2, 3, 5))
        return int(excess_NS.reshape(-1)[tokens.start - start : tokens.stop - start].sum())

    def warm_up(self) -> None:
        """As DeviceWriter.warm_up(); there is nothing to make ready."""

    def _spread(self, source_NLTHSD: Bits, block_ids: Sequence[int], spec: FrameSpec, tokens: range) -> None:
        """Assigns the tokens of the sequence, as many at once as lie in the same slots on both sides."""
        source_size, target_size = source_NLTHSD.shape[4], self._target_NLTHSD.shape[4]
        layers = slice(spec.first_layer, spec.first_layer + spec.num_layers)
        for firsts, count in block_runs(tokens, source_size, target_size):
            rows = blocks_of(firsts, source_size, spec.first_block)
            slot = firsts.start % source_size
            source = source_NLTHSD[rows, :, :, :, slot : slot + count]
            ids = block_ids[blocks_of(firsts, target_size)]
            slot = firsts.start % target_size
            # A slice is found faster than a list of one.
            where = list(ids) if len(ids) > 1 else slice(ids[0], ids[0] + 1)
            self._target_NLTHSD[where, layers, :, :, slot : slot + count] = source


def block_runs(tokens: range, source_size: int, target_size: int) -> Iterator[tuple[range, int]]:
    """(firsts, count): the `count` tokens from each of firsts on cross no block border of either side.

    Borders repeat after lcm(source_size, target_size) tokens, and so do the slots of the runs
    between them. So there are at most lcm / source_size + lcm / target_size + 1 pairs, however
    many tokens: 3 for equal sizes, of which two only hold the blocks that are cut off at the ends.
    """
    sizes = (source_size, target_size)
    period = lcm(*sizes)
    whole = range(min(-(-tokens.start // n) * n for n in sizes), max(tokens.stop // n * n for n in sizes))
    head = range(tokens.start, min(whole.start, tokens.stop), period)
    tail = range(max(whole.stop, head.stop), tokens.stop, period)
    for part in (head, tail):
        if part:
            yield part, part.stop - part.start
    first = whole.start
    while first < min(whole.stop, whole.start + period):
        border = min((first // n + 1) * n for n in sizes)
        yield range(first, whole.stop, period), border - first
        first = border


def blocks_of(tokens: range, block_size: int, first_block: int = 0) -> slice:
    """The blocks of the tokens, from first_block on; a step is a whole number of blocks."""
    first, last = (token // block_size - first_block for token in (tokens[0], tokens[-1]))
    return slice(first, last + 1, tokens.step // block_size)


def logical(values: Values, fmt: KvFormat, frame: Frame) -> Values:
    """[N, L, 2, H, S, D] view of the values of a frame's payload, an array or a tensor."""
    outer = (frame.spec.num_blocks, frame.spec.num_layers)
    inner = (fmt.num_kv_heads, fmt.block_size)
    if fmt.layout == "NHD":
        inner = (fmt.block_size, fmt.num_kv_heads)
    shaped: Any = values.reshape(*(outer[::-1] if frame.layers_first else outer), 2, *inner, fmt.head_dim)
    if frame.layers_first:
        shaped = shaped.swapaxes(0, 1)
    return cast(Values, shaped if fmt.layout == "HND" else shaped.swapaxes(3, 4))


def _in_rows(bits_NLTHSD: Bits) -> Bits:
    """The same memory with all of a token's head as one element where it is contiguous: faster to copy."""
    if bits_NLTHSD.strides[-1] != bits_NLTHSD.itemsize:
        return bits_NLTHSD
    return bits_NLTHSD.view(np.dtype((np.void, bits_NLTHSD.shape[-1] * bits_NLTHSD.itemsize)))
