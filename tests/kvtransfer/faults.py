"""A KvTransport that misbehaves on purpose, around another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from baton.errors import PeerLost
from kvtransfer.contract import Answer, FirstToken, KvTransport, KvWriter, Ticket, TransferTarget

FAULTS = ("drop", "duplicate", "reorder", "corrupt", "stall", "cut")


class FaultyTransport:
    """Misbehaves at the given frames, counted as they are sent, resends included.

    drop: the frame vanishes. duplicate: it arrives twice. reorder: it arrives after
    the next frame, or right before the commit. corrupt: one bit flips. stall: the
    write never returns. cut: the stream breaks.
    """

    def __init__(self, inner: KvTransport, faults: Mapping[int, str], bit: int = 12_345) -> None:
        self._inner = inner
        self.faults = dict(faults)
        self.bit = bit
        self.num_sent = 0

    async def connect(self, target: TransferTarget) -> None:
        await self._inner.connect(target)

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
        self._held: list[tuple[bytes, memoryview]] = []

    async def send_frame(self, header: bytes, payload: memoryview) -> None:
        fault = self._transport.faults.get(self._transport.num_sent)
        self._transport.num_sent += 1
        held, self._held = self._held, []
        match fault:
            case "drop":
                pass
            case "duplicate":
                await self._inner.send_frame(header, payload)
                await self._inner.send_frame(header, payload)
            case "reorder":
                self._held = [(header, memoryview(bytes(payload)))]
            case "corrupt":
                await self._send_corrupt(header, payload)
            case "stall":
                await asyncio.Event().wait()
            case "cut":
                raise PeerLost("the stream was cut")
            case _:
                await self._inner.send_frame(header, payload)
        for frame in held:
            await self._inner.send_frame(*frame)

    async def _send_corrupt(self, header: bytes, payload: memoryview) -> None:
        frame = bytearray(header + payload)
        bit = self._transport.bit % (8 * len(frame))
        frame[bit // 8] ^= 1 << bit % 8
        await self._inner.send_frame(bytes(frame[: len(header)]), memoryview(frame)[len(header) :])

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        for frame in self._held:
            await self._inner.send_frame(*frame)
        self._held = []
        return await self._inner.commit(num_frames, first_token)
