"""Moving KV between a paged cache and the payload of a frame.

Owns the mapping (block, slot) <-> (token of the sequence) and the conversion of
dtype, layout and block size. Must not know leases, streams or time.

Both directions go through the cache's logical view, so real strides are obeyed
whatever the storage looks like. Shape suffixes: N blocks, L layers, T the two of
keys and values, H kv heads, S slots of a block, D head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch

from engine.kv_cache import CacheShape, KVCache
from kvtransfer.contract import KvFormat, Layout
from kvtransfer.wire import Frame, FrameSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# A received payload is read-only; the tensors made from it here are only ever read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
_FLOAT16_MAX = torch.finfo(torch.float16).max


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


def gather(cache: KVCache, fmt: KvFormat, block_ids: Sequence[int], spec: FrameSpec) -> memoryview:
    """Copies the blocks of a frame out of the sender's cache.

    block_ids: all blocks of the sequence, borrowed for this call. The result is
    fresh contiguous memory in the cache's own dtype and layout. Slots of the last
    block beyond spec.num_tokens carry whatever lies there.
    """
    ids = torch.tensor(block_ids[spec.first_block : spec.first_block + spec.num_blocks])
    layers = slice(spec.first_layer, spec.first_layer + spec.num_layers)
    source_NLTHSD = cache.logical[:, layers]
    physical = source_NLTHSD if fmt.layout == "HND" else source_NLTHSD.transpose(-3, -2)
    # contiguous() only matters for exotic strides: index_select keeps the order it is given.
    payload = physical.index_select(0, ids.to(physical.device)).cpu().contiguous()
    return payload.view(torch.uint8).reshape(-1).numpy().data


def scatter(
    cache: KVCache, fmt: KvFormat, block_ids: Sequence[int], frame: Frame, *, num_held_tokens: int = 0
) -> int:
    """Writes a verified frame into the receiver's cache, converting as needed.

    fmt: the sender's format. block_ids: all blocks of the sequence, owned by the
    lease. Leading num_held_tokens are already there and stay untouched, as does
    every slot that holds no token of the frame. Returns how many values exceeded
    float16 and were saturated.
    """
    spec = frame.spec
    source_NLTHSD, num_saturated = _convert(_source(fmt, frame), cache.logical.dtype)
    source_NLTHSD = source_NLTHSD.to(cache.logical.device)
    target_NLTHSD = cache.logical[:, spec.first_layer : spec.first_layer + spec.num_layers]
    start = spec.first_block * fmt.block_size
    end = start + spec.num_tokens
    begin = max(start, num_held_tokens)
    whole = range(0)
    if fmt.block_size == cache.shape.block_size:
        whole = range(-(-begin // fmt.block_size), end // fmt.block_size)
    if whole:
        ids = torch.tensor(block_ids[whole.start : whole.stop], device=target_NLTHSD.device)
        rows = slice(whole.start - spec.first_block, whole.stop - spec.first_block)
        target_NLTHSD.index_copy_(0, ids, source_NLTHSD[rows])
        edges = (range(begin, whole.start * fmt.block_size), range(whole.stop * fmt.block_size, end))
    else:
        edges = (range(begin, end), range(0))
    for tokens in edges:
        _copy_tokens(target_NLTHSD, block_ids, source_NLTHSD, start, tokens)
    return num_saturated


def _source(fmt: KvFormat, frame: Frame) -> torch.Tensor:
    flat = torch.from_numpy(np.frombuffer(frame.payload, dtype=np.uint8)).view(DTYPES[fmt.dtype])
    heads, slots = fmt.num_kv_heads, fmt.block_size
    inner = (heads, slots) if fmt.layout == "HND" else (slots, heads)
    shaped = flat.view(frame.spec.num_blocks, frame.spec.num_layers, 2, *inner, fmt.head_dim)
    return shaped if fmt.layout == "HND" else shaped.transpose(-3, -2)


def _convert(source: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """The values in another dtype, and how many finite ones were too large for it and were saturated.

    NaN and infinity stay what they are: they must end the request by name, not hide as large numbers.
    """
    converted = source.to(dtype)
    if source.dtype == dtype or dtype != torch.float16:
        return converted, 0
    low, high = source.aminmax()
    if low > -_FLOAT16_MAX and high < _FLOAT16_MAX:  # false with NaN
        return converted, 0
    excess = converted.isinf() & source.isfinite()
    limit = torch.full_like(converted, _FLOAT16_MAX).copysign(converted)
    return torch.where(excess, limit, converted), int(excess.sum())


def _copy_tokens(
    target_NLTHSD: torch.Tensor,
    block_ids: Sequence[int],
    source_NLTHSD: torch.Tensor,
    source_start: int,
    tokens: range,
) -> None:
    """Copies tokens of the sequence; source_start is the token in the source's first slot."""
    source_block_size, target_block_size = source_NLTHSD.shape[4], target_NLTHSD.shape[4]
    for token, count in _runs(tokens, source_block_size, target_block_size):
        target_block, target_slot = divmod(token, target_block_size)
        source_block, source_slot = divmod(token - source_start, source_block_size)
        target = target_NLTHSD[block_ids[target_block], :, :, :, target_slot : target_slot + count]
        target.copy_(source_NLTHSD[source_block, :, :, :, source_slot : source_slot + count])


def _runs(tokens: range, source_block_size: int, target_block_size: int) -> Iterator[tuple[int, int]]:
    """(token, count) of the longest runs that cross no block border of either side."""
    token = tokens.start
    while token < tokens.stop:
        border = min(
            (token // source_block_size + 1) * source_block_size,
            (token // target_block_size + 1) * target_block_size,
            tokens.stop,
        )
        yield token, border - token
        token = border
