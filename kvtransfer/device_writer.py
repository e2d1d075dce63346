"""Moving KV from the payload of a frame into a cache on a device.

Owns the device's copy of a payload, and which of its blocks go which way. Must not know leases, streams of
bytes or time. Where tokens lie on both sides is kvtransfer/scatter.py's knowledge.

A payload is uploaded once, as it came. Whole blocks are spread and converted by a kernel; cut ones, and all
where block sizes differ or there is no kernel, by torch's indexing on the device.

Shape suffixes: N blocks, L layers, T the two of keys and values, H kv heads, S slots of a block, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch

from baton.limits import blocks_needed
from engine.kv_cache import KVCache
from engine.model.kv_range import narrowed
from kvtransfer.contract import KvFormat, Layout
from kvtransfer.conversion import DTYPES
from kvtransfer.plan import MAX_FRAME_BYTES
from kvtransfer.scatter import BlockWriter, block_runs, blocks_of, format_of, logical
from kvtransfer.side_stream import SideStream, Stream
from kvtransfer.wire import Frame, FrameSpec

if TYPE_CHECKING:
    from engine.kernels.choices import Choices

# Of a payload in memory, in bytes. For memory that is not aligned so, a kernel is compiled once more.
_ALIGNMENT = 16


def writer_of(cache: KVCache, choices: Choices | None = None) -> BlockWriter | DeviceWriter:
    """The writer for a cache, by the device it is on. choices: as of DeviceWriter."""
    return BlockWriter(cache) if cache.device.type == "cpu" else DeviceWriter(cache, choices)


class DeviceWriter:
    """Writes received frames into one cache. Not for use by two threads at once.

    choices: of the engine's kernels; None where it computes without them.

    On a stream of its own, because that of the steps may be a whole step behind. write() sleeps until the
    values are there, so a step that is launched later finds them. It sleeps once: what goes to the device and
    what comes back lies in pinned memory, and so waits for nothing by itself.
    """

    def __init__(self, cache: KVCache, choices: Choices | None, *, stream: Stream | None = None) -> None:
        self._cache = cache
        self._target_NLTHSD = cache.logical
        self._stream = stream or SideStream(cache.device)
        self._scatter = None if choices is None else _scatter(choices)
        self._is_pinned = cache.device.type == "cuda"
        self._make_room(_ALIGNMENT + 4 * cache.shape.num_blocks + MAX_FRAME_BYTES)
        self._num_saturated = torch.zeros((), dtype=torch.int64, pin_memory=self._is_pinned)

    def write(
        self, fmt: KvFormat, block_ids: Sequence[int], frame: Frame, *, num_held_tokens: int = 0
    ) -> int:
        """As BlockWriter.write()."""
        spec, size = frame.spec, self._target_NLTHSD.shape[4]
        start = spec.first_block * fmt.block_size
        tokens = range(max(start, num_held_tokens), start + spec.num_tokens)
        first_id = start // size
        ids = block_ids[first_id : blocks_needed(tokens.stop, size)]
        self._num_saturated.zero_()
        with self._stream.behind(None):
            ids_n, values = self._uploaded(ids, frame.payload)
            source_NLTHSD = logical(values.view(DTYPES[fmt.dtype]), fmt, frame)
            self._spread(source_NLTHSD, ids_n, first_id, frame, tokens)
            self._count_saturated(source_NLTHSD, slice(tokens.start - start, tokens.stop - start))
        return int(self._num_saturated)

    def warm_up(self) -> None:
        """Makes the device ready for every kind of sender, so that no frame waits for the kernels' compiler.

        Call it before the cache holds anything: it writes to block 0. Takes seconds if nothing is compiled.
        """
        size = self._cache.shape.block_size
        for dtype, layout in product(DTYPES, get_args(Layout)):
            fmt = replace(format_of(self._cache.shape), dtype=dtype, layout=layout)
            for num_tokens in {size, max(1, size - 1)}:
                spec = FrameSpec(
                    index=0, first_block=0, num_blocks=1, num_tokens=num_tokens, first_layer=0, num_layers=1
                )
                self.write(fmt, [0], Frame(spec, memoryview(bytes(spec.payload_bytes(fmt)))))

    def _make_room(self, num_bytes: int) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._room = torch.empty(num_bytes, dtype=torch.uint8, device=self._cache.device)

    def _uploaded(self, ids: Sequence[int], payload: memoryview) -> tuple[torch.Tensor, torch.Tensor]:
        """([n] int32, bytes): block ids and a payload on the device, in one copy."""
        ids_n = np.asarray(ids, np.int32)
        first = -(-ids_n.nbytes // _ALIGNMENT) * _ALIGNMENT
        end = first + payload.nbytes
        if len(self._host) < end:
            self._make_room(end)
        host = self._host.numpy()
        host[: ids_n.nbytes] = ids_n.view(np.uint8)
        host[first:end] = np.frombuffer(payload, np.uint8)
        room = self._room[:end].copy_(self._host[:end], non_blocking=True)
        return room[: ids_n.nbytes].view(torch.int32), room[first:]

    def _spread(
        self,
        source_NLTHSD: torch.Tensor,
        ids_n: torch.Tensor,
        first_id: int,
        frame: Frame,
        tokens: range,
    ) -> None:
        """As BlockWriter does; values that change their type do so by engine/model/kv_range.py's rule.

        ids: of the sequence's blocks, from number first_id on.
        """
        spec, target_NLTHSD = frame.spec, self._target_NLTHSD
        source_size, target_size = source_NLTHSD.shape[4], target_NLTHSD.shape[4]
        layers = slice(spec.first_layer, spec.first_layer + spec.num_layers)
        for firsts, count in block_runs(tokens, source_size, target_size):
            ids = ids_n[blocks_of(firsts, target_size, first_id)]
            rows_NLTHSD = source_NLTHSD[blocks_of(firsts, source_size, spec.first_block)]
            if self._scatter is not None and count == source_size == target_size:
                # In memory of their own, which is aligned: the kernel would be compiled for other memory too.
                self._scatter(rows_NLTHSD, ids.clone(), target_NLTHSD[:, layers])
            else:
                first = firsts.start % source_size
                piece = narrowed(rows_NLTHSD[..., first : first + count, :], target_NLTHSD.dtype)
                first = firsts.start % target_size
                target_NLTHSD[ids, layers, :, :, first : first + count] = piece

    def _count_saturated(self, source_NLTHSD: torch.Tensor, tokens: slice) -> None:
        if self._target_NLTHSD.dtype != torch.float16 or source_NLTHSD.dtype == torch.float16:
            return
        excess_NLTHSD = source_NLTHSD.to(torch.float16).isinf() & source_NLTHSD.isfinite()
        count = excess_NLTHSD.sum(dim=(1, 2, 3, 5)).reshape(-1)[tokens].sum()
        self._num_saturated.copy_(count, non_blocking=True)


def _scatter(choices: Choices) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    # Triton is there only where the engine has kernels.
    from engine.kernels.block_copy import scatter_blocks  # noqa: PLC0415

    return partial(scatter_blocks, choices=choices)
