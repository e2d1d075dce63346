"""Reading frames out of the sender's cache.

Owns the way from (blocks, layers) to bytes. Must not know leases, streams or time.

A cache on the CPU whose blocks are one run of bytes each is read in place: a frame is a
list of views, and whoever sends it makes the only copy. Any other cache is read through its
logical view, whatever its strides, into memory of the frame's own.

Shape suffixes: N blocks, L layers, T the two of keys and values, H kv heads, S slots of a
block, D head dim, B bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv_cache import KVCache
from engine.stored import DONE, Stored
from kvtransfer.contract import KvFormat
from kvtransfer.scatter import format_of
from kvtransfer.wire import FrameSpec, encode_header


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes of a frame in pieces, in order.

    layers_first: whether they are layer by layer rather than block by block.
    release: to be called once, when nobody reads them any more.
    """

    runs: list[memoryview]
    layers_first: bool = False
    release: Callable[[], None] = lambda: None


class Reader(Protocol):
    """Reads the blocks of one cache.

    format: how they go over the wire.  counters: what it has counted since the start, by kind.
    """

    format: KvFormat
    counters: Counter[str]

    @property
    def memory(self) -> NDArray[np.uint8] | None:
        """All bytes that payloads may lie in; None where that cannot be said."""

    def read(self, block_ids: Sequence[int], spec: FrameSpec, stored: Stored = DONE) -> Payload:
        """The payload of a frame; runs off the event loop and may wait.

        block_ids: all blocks of the sequence, borrowed until the payload is released.
        stored: what has to have happened before they are read.
        Slots of the last block beyond spec.num_tokens carry whatever lies there.
        """


class HostReader:
    """A Reader of a cache in host memory."""

    def __init__(self, cache: KVCache) -> None:
        self.format = format_of(cache.shape)
        self.counters: Counter[str] = Counter()
        self._cache = cache
        self._rows_NLB = _rows(cache)

    @property
    def memory(self) -> NDArray[np.uint8] | None:
        """All bytes that payloads may lie in, where frames are read in place."""
        return None if self._rows_NLB is None else self._rows_NLB.reshape(-1)

    def read(self, block_ids: Sequence[int], spec: FrameSpec, stored: Stored = DONE) -> Payload:
        """The payload of a frame, in place if every block of a layer is one run."""
        if stored.event is not None:
            stored.event.synchronize()
        ids = block_ids[spec.first_block : spec.first_block + spec.num_blocks]
        layers = slice(spec.first_layer, spec.first_layer + spec.num_layers)
        if self._rows_NLB is not None:
            return Payload([self._rows_NLB[block_id, layers].reshape(-1).data for block_id in ids])
        source_NLTHSD = self._cache.logical[:, layers]
        physical = source_NLTHSD if self.format.layout == "HND" else source_NLTHSD.transpose(-3, -2)
        copied = physical.index_select(0, torch.tensor(ids)).contiguous()
        return Payload([copied.view(torch.uint8).reshape(-1).numpy().data])


def _rows(cache: KVCache) -> NDArray[np.uint8] | None:
    """[N, L, B] bytes of the cache; None if a block of a layer is not one run."""
    shape = cache.shape
    physical = cache.logical if shape.layout == "HND" else cache.logical.transpose(-3, -2)
    if not physical.is_contiguous():
        return None
    return physical.view(torch.uint8).reshape(shape.num_blocks, shape.num_layers, -1).numpy()


class CacheFrame:
    """One frame of one transfer: an OutgoingFrame. stored: what has to happen before it is read."""

    def __init__(
        self,
        reader: Reader,
        block_ids: Sequence[int],
        spec: FrameSpec,
        *,
        has_digest: bool = True,
        stored: Stored = DONE,
    ) -> None:
        self.spec = spec
        self.stored = stored
        self._reader = reader
        self._block_ids = block_ids
        self._has_digest = has_digest
        self._payload: Payload | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.spec.payload_bytes(self._reader.format)

    def runs(self) -> list[memoryview]:
        """The payload in pieces, in order."""
        return self._read().runs

    def header(self) -> bytes:
        """The header, with the digest of the payload unless there is none."""
        payload = self._read()
        return encode_header(
            self.spec,
            self._reader.format,
            payload.runs,
            layers_first=payload.layers_first,
            has_digest=self._has_digest,
        )

    def _read(self) -> Payload:
        """Once, so that digest, order and bytes are of the same reading."""
        if self._payload is None:
            self._payload = self._reader.read(self._block_ids, self.spec, self.stored)
        return self._payload

    def release(self) -> None:
        """The payload is not needed any more. Idempotent."""
        payload, self._payload = self._payload, None
        if payload is not None:
            payload.release()
