"""Reading frames out of a cache on a device: through a ring of pinned host buffers, on a stream of its own.

Owns the stream, the buffers and who has them. Must not know leases, streams of bytes, or steps; an
event says when what a step writes is there.

A step's stream is never waited for by the host and never waits for a transfer. The number of buffers
bounds what is read ahead of the network: without a free one the reading thread sleeps.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from baton.errors import KvTransferFailed
from engine.kv_cache import KVCache
from kvtransfer.outgoing import HostReader, Payload, Reader
from kvtransfer.scatter import format_of
from kvtransfer.wire import FrameSpec

NUM_BUFFERS = 16
# Buffers come back when frames are sent, and a send that makes no progress is ended long before.
_MAX_WAIT_S = 60.0


def reader_of(cache: KVCache, max_frame_bytes: int) -> Reader:
    """The reader for a cache, by the device it is on."""
    return HostReader(cache) if cache.device.type == "cpu" else StagedReader(cache, max_frame_bytes)


class Gatherer(Protocol):
    """Copies blocks to the host."""

    def __call__(
        self,
        source_NLTHSD: torch.Tensor,
        block_ids: Sequence[int],
        target: torch.Tensor,
        stored: torch.cuda.Event | None,
    ) -> None:
        """Copies the blocks of a device into host bytes; returns when they are there.

        stored: what has to have fired before the blocks are read.
        """


class SideStream:
    """A Gatherer on a CUDA stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(
        self,
        source_NLTHSD: torch.Tensor,
        block_ids: Sequence[int],
        target: torch.Tensor,
        stored: torch.cuda.Event | None,
    ) -> None:
        """Gathers on the device, copies once, and sleeps until the copy has ended."""
        with torch.cuda.stream(self._stream):
            if stored is not None:
                self._stream.wait_event(stored)
            ids = torch.tensor(block_ids, device=source_NLTHSD.device)
            gathered = source_NLTHSD.index_select(0, ids).contiguous()
            target.copy_(gathered.view(torch.uint8).reshape(-1), non_blocking=True)
            # With `blocking` the thread sleeps instead of spinning on a core.
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        copied.synchronize()


class StagedReader:
    """A Reader of a cache on a device.

    max_frame_bytes: largest payload that is ever read; one block of one layer always fits.
    """

    def __init__(
        self,
        cache: KVCache,
        max_frame_bytes: int,
        *,
        gather: Gatherer | None = None,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self.format = format_of(cache.shape)
        self._cache = cache
        self._gather = gather or SideStream(cache.device)
        num_bytes = max(max_frame_bytes, self.format.layer_block_bytes)
        is_pinned = cache.device.type == "cuda"
        self._buffers = torch.zeros(num_buffers, num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(num_buffers):
            self._free.put(index)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All bytes that payloads lie in."""
        return self._buffers.reshape(-1).numpy()

    @property
    def num_free(self) -> int:
        """Buffers that no frame has."""
        return self._free.qsize()

    def read(
        self, block_ids: Sequence[int], spec: FrameSpec, stored: torch.cuda.Event | None = None
    ) -> Payload:
        """The payload of a frame, in a buffer that is the frame's until it is released."""
        layers = slice(spec.first_layer, spec.first_layer + spec.num_layers)
        source_NLTHSD = self._cache.logical[:, layers]
        if self.format.layout == "NHD":
            source_NLTHSD = source_NLTHSD.transpose(-3, -2)
        index = self._take()
        try:
            target = self._buffers[index, : spec.payload_bytes(self.format)]
            ids = block_ids[spec.first_block : spec.first_block + spec.num_blocks]
            self._gather(source_NLTHSD, ids, target, stored)
        except BaseException:
            self._free.put(index)
            raise
        return Payload([target.numpy().data], partial(self._free.put, index))

    def _take(self) -> int:
        try:
            return self._free.get(timeout=_MAX_WAIT_S)
        except queue.Empty:
            raise KvTransferFailed(
                f"no buffer came back within {_MAX_WAIT_S:g} s; transfers are stuck"
            ) from None
