"""A KvTransport that misbehaves on purpose, around another one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from baton.errors import PeerLost
from kvtransfer.contract import (
    Answer,
    FirstToken,
    KvTransport,
    KvWriter,
    OutgoingFrame,
    Pairing,
    Peer,
    Ticket,
    TransferTarget,
)

FAULTS = ("drop", "duplicate", "reorder", "corrupt", "stall", "cut")


class FaultyTransport:
    """Misbehaves at the given frames, counted as they are sent, resends included.

    drop: the frame vanishes. duplicate: it arrives twice. reorder: it arrives after
    the next batch, or right before the commit. corrupt: one bit flips, behind the digest. stall:
    the write never returns. cut: the stream breaks.
    """

    def __init__(self, inner: KvTransport, faults: Mapping[int, str], bit: int = 12_345) -> None:
        self._inner = inner
        self.faults = dict(faults)
        self.bit = bit
        self.num_sent = 0

    @property
    def counters(self) -> Counter[str]:
        return self._inner.counters

    @property
    def on_changed(self) -> Callable[[int, Pairing], None]:
        return self._inner.on_changed

    @on_changed.setter
    def on_changed(self, listener: Callable[[int, Pairing], None]) -> None:
        self._inner.on_changed = listener

    async def pair(self, peer: Peer) -> Pairing:
        return await self._inner.pair(peer)

    async def part(self, incarnation: int) -> None:
        await self._inner.part(incarnation)

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[FaultyWriter]:
        async with self._inner.open(ticket, target) as writer:
            yield FaultyWriter(self, writer)

    async def close(self) -> None:
        await self._inner.close()


class FaultyWriter:
    def __init__(self, transport: FaultyTransport, inner: KvWriter) -> None:
        self._transport = transport
        self._inner = inner
        self._held: list[OutgoingFrame] = []
        self._one_post = asyncio.Lock()

    @property
    def max_batch(self) -> int:
        return self._inner.max_batch

    @property
    def wait_s(self) -> float:
        return self._inner.wait_s

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> list[Any]:
        held, self._held = self._held, []
        batch: list[OutgoingFrame] = []
        for frame in frames:
            batch += await self._faulted(frame)
        prepared: list[Any] = []
        batch += held
        # A batch that has grown is sent in two, as the writer allows no more at a time.
        for start in range(0, len(batch), self.max_batch):
            if prepared:
                await self.post([prepared.pop()])
            prepared.append(await self._inner.prepare(batch[start : start + self.max_batch]))
        return prepared

    async def post(self, prepared: list[Any]) -> None:
        async with self._one_post:
            for batch in prepared:
                await self._inner.post(batch)

    async def _faulted(self, frame: OutgoingFrame) -> list[OutgoingFrame]:
        fault = self._transport.faults.get(self._transport.num_sent)
        self._transport.num_sent += 1
        match fault:
            case "drop":
                return []
            case "duplicate":
                return [frame, frame]
            case "reorder":
                self._held.append(frame)
                return []
            case "corrupt":
                return [AlteredFrame(frame, self._transport.bit)]
            case "stall":
                await asyncio.Event().wait()
            case "cut":
                raise PeerLost("the stream was cut")
        return [frame]

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        await self.post(await self.prepare(()))
        return await self._inner.commit(num_frames, first_token)


class AlteredFrame:
    """A frame of which one bit, of its header or its payload, flips after the digest was made."""

    def __init__(self, frame: OutgoingFrame, bit: int) -> None:
        self._header, self._runs = bytearray(frame.header()), frame.runs()
        bit %= 8 * (len(self._header) + frame.num_bytes)
        altered = self._header
        if bit >= 8 * len(self._header):
            # Only here: one-sided writes need a payload that lies in the cache.
            bit -= 8 * len(self._header)
            altered = bytearray(b"".join(self._runs))
            self._runs = [memoryview(altered)]
        altered[bit // 8] ^= 1 << bit % 8

    @property
    def num_bytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def runs(self) -> Sequence[memoryview]:
        return self._runs

    def header(self) -> bytes:
        return bytes(self._header)
