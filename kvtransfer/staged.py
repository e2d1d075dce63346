"""Reading frames out of a cache on a device: through a ring of pinned host buffers, on a stream of its own.

Owns the buffers, who has them, and from where a frame is read. Must not know leases, streams of bytes, or
steps: engine.stored.Stored says when what a step writes is there, and where it lies a second time.

    stage    a layer's blocks lie side by side    a copy for each layer
    cache    a block's layers lie side by side    a copy for each block; many are gathered first, for one

A frame of fewer layers than blocks is read from the stage, if it is there. If a later step has taken the
stage meanwhile, the frame is read again, from the cache.

A step's stream is never waited for by the host and never waits for a transfer. The number of buffers
bounds what is read ahead of the network: without a free one the reading thread sleeps.

Shape suffixes: N blocks of the cache, n some of them, L layers, T the two of keys and values, H kv heads,
S slots of a block, D head dim.
"""

from __future__ import annotations

import math
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from baton.errors import KvTransferFailed
from engine.kv_cache import KVCache
from engine.stored import DONE, Stored
from kvtransfer.outgoing import HostReader, Payload, Reader
from kvtransfer.scatter import format_of
from kvtransfer.side_stream import SideStream, Stream
from kvtransfer.wire import FrameSpec

if TYPE_CHECKING:
    from engine.kernels.choices import Choices

NUM_BUFFERS = 16
# Buffers come back when frames are sent, and a send that makes no progress is ended long before.
_MAX_WAIT_S = 60.0
# Most blocks that are copied each for itself, by the device's copy engine alone. Not measured yet.
_MAX_RUNS = 8
# Of a cache, ids, and where the blocks go.
Gather = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def reader_of(cache: KVCache, max_frame_bytes: int, choices: Choices | None = None) -> Reader:
    """The reader for a cache, by the device it is on. choices: as of StagedReader."""
    if cache.device.type == "cpu":
        return HostReader(cache)
    return StagedReader(cache, max_frame_bytes, choices)


class StagedReader:
    """A Reader of a cache on a device. read() is for one thread at a time.

    max_frame_bytes: largest payload that is ever read; one block of one layer always fits.
    choices: of the engine's kernels; None where it computes without them.
    counters: staged_frames and cache_frames, by where they were read; overtaken_frames were to be read from
        a stage, and were read from the cache.
    """

    def __init__(
        self,
        cache: KVCache,
        max_frame_bytes: int,
        choices: Choices | None = None,
        *,
        stream: Stream | None = None,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self.format = format_of(cache.shape)
        self.counters = Counter(staged_frames=0, cache_frames=0, overtaken_frames=0)
        self._cache_NLTHSD = cache.logical
        self._stream = stream or SideStream(cache.device)
        self._gather = _index_select if choices is None else _kernel(choices)
        block_bytes = self.format.layer_block_bytes
        num_bytes = max(max_frame_bytes, block_bytes)
        is_pinned = cache.device.type == "cuda"
        self._buffers = torch.zeros(num_buffers, num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(num_buffers):
            self._free.put(index)
        # The blocks of one frame, gathered, and their ids: a read has ended before the next begins.
        self._room = torch.empty(num_bytes, dtype=torch.uint8, device=cache.device)
        self._host_ids = torch.empty(num_bytes // block_bytes, dtype=torch.int32, pin_memory=is_pinned)
        self._ids = self._host_ids.to(cache.device)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All bytes that payloads lie in."""
        return self._buffers.reshape(-1).numpy()

    @property
    def num_free(self) -> int:
        """Buffers that no frame has."""
        return self._free.qsize()

    def read(self, block_ids: Sequence[int], spec: FrameSpec, stored: Stored = DONE) -> Payload:
        """The payload of a frame, in a buffer that is the frame's until it is released."""
        index = self._take()
        try:
            target = self._buffers[index, : spec.payload_bytes(self.format)]
            ids = block_ids[spec.first_block : spec.first_block + spec.num_blocks]
            is_staged = self._from_stage(ids, spec, target, stored)
            if not is_staged:
                self._from_cache(ids, spec, target, stored)
        except BaseException:
            self._free.put(index)
            raise
        return Payload([target.numpy().data], layers_first=is_staged, release=partial(self._free.put, index))

    def _take(self) -> int:
        try:
            return self._free.get(timeout=_MAX_WAIT_S)
        except queue.Empty:
            raise KvTransferFailed(
                f"no buffer came back within {_MAX_WAIT_S:g} s; transfers are stuck"
            ) from None

    def _from_stage(self, ids: Sequence[int], spec: FrameSpec, target: torch.Tensor, stored: Stored) -> bool:
        """Whether the frame is in the target now, layer by layer."""
        staged = stored.staged
        place = staged.find(ids) if staged is not None and spec.num_layers < len(ids) else None
        if staged is None or place is None:
            return False
        if staged.is_intact:
            with self._stream.behind(stored.event):
                _copy(self._physical(staged.layers_Ln2Kbh[_layers(spec), place]), target)
        # Of a copy that has ended.
        is_intact = staged.is_intact
        self.counters["staged_frames" if is_intact else "overtaken_frames"] += 1
        return is_intact

    def _from_cache(self, ids: Sequence[int], spec: FrameSpec, target: torch.Tensor, stored: Stored) -> None:
        cache_NLTHSD = self._cache_NLTHSD[:, _layers(spec)]
        with self._stream.behind(stored.event):
            if len(ids) <= _MAX_RUNS:
                _copy([self._physical(cache_NLTHSD[index]) for index in ids], target)
            else:
                target.copy_(self._gathered(cache_NLTHSD, ids), non_blocking=True)
        self.counters["cache_frames"] += 1

    def _gathered(self, cache_NLTHSD: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """Bytes of some blocks, on the device."""
        ids_n = self._ids[: len(ids)]
        # From pinned memory: from other memory the host would wait for the step.
        ids_n.copy_(self._host_ids[: len(ids)].copy_(torch.tensor(ids)), non_blocking=True)
        shape = (len(ids), *self._physical(cache_NLTHSD).shape[1:])
        memory = self._room[: math.prod(shape) * cache_NLTHSD.itemsize]
        gathered_nLTHSD = self._physical(memory.view(cache_NLTHSD.dtype).view(shape))
        self._gather(cache_NLTHSD, ids_n, gathered_nLTHSD)
        return memory

    def _physical(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks [..., H, S, D] as they lie in memory and go over the wire; and the other way."""
        return blocks.transpose(-3, -2) if self.format.layout == "NHD" else blocks


def _layers(spec: FrameSpec) -> slice:
    return slice(spec.first_layer, spec.first_layer + spec.num_layers)


def _copy(runs: Sequence[torch.Tensor] | torch.Tensor, target: torch.Tensor) -> None:
    """Copies runs of equal size one behind the other, each contiguous."""
    for run, piece in zip(runs, target.view(len(runs), -1), strict=True):
        values = run.view(torch.uint8)
        piece.view(values.shape).copy_(values, non_blocking=True)


def _index_select(cache_NLTHSD: torch.Tensor, ids_n: torch.Tensor, gathered_nLTHSD: torch.Tensor) -> None:
    gathered_nLTHSD.copy_(cache_NLTHSD.index_select(0, ids_n))


def _kernel(choices: Choices) -> Gather:
    # Triton is there only where the engine has kernels.
    from engine.kernels.block_copy import gather_blocks  # noqa: PLC0415

    return partial(gather_blocks, choices=choices)
