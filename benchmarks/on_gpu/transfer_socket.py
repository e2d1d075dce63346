"""A KvTransport over a Unix-domain socket, for a benchmark of two processes with no package but torch.

Owns a write's connection at the sender. Messages are benchmarks/on_gpu/transfer_wire.py's.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from baton.errors import IncompatiblePeer, PeerLost
from benchmarks.on_gpu.transfer_wire import Kind, Wire, answer_of, ticket_json
from kvtransfer.contract import (
    Answer,
    AnsweredEarly,
    FirstToken,
    KvFormat,
    Offload,
    OutgoingFrame,
    Pairing,
    Peer,
    Resend,
    Ticket,
    TransferTarget,
)


class SocketTransport:
    """A KvTransport of a sender. offload: reads the cache off the event loop."""

    def __init__(self, fmt: KvFormat, offload: Offload[Any]) -> None:
        self.counters: Counter[str] = Counter()
        self.on_changed: Callable[[int, Pairing], None] = lambda _incarnation, _pairing: None
        self._format = fmt
        self._offload = offload
        self._addresses: dict[int, str] = {}

    async def pair(self, peer: Peer) -> Pairing:
        """As KvTransport.pair()."""
        wire = await _connect(peer.address, peer.worker)
        try:
            await wire.say(Kind.PAIR, asdict(self._format))
            kind, said = await wire.hear()
        except (OSError, EOFError) as error:
            raise PeerLost(f"{peer.worker} does not answer") from error
        finally:
            wire.close()
        if kind is not Kind.PAIRED:
            raise IncompatiblePeer(said["message"], field=said["field"])
        self._addresses[peer.incarnation] = peer.address
        return Pairing(transport="socket")

    async def part(self, incarnation: int) -> None:
        """As KvTransport.part()."""
        self._addresses.pop(incarnation, None)

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[SocketWriter]:
        """As KvTransport.open()."""
        wire = await _connect(self._addresses.get(target.incarnation, ""), target.worker)
        writer = SocketWriter(wire, target.worker, self._offload)
        try:
            await writer.begin(ticket)
            yield writer
        finally:
            await writer.close()

    async def close(self) -> None:
        """Nothing outlives a write."""


class SocketWriter:
    """A KvWriter. A task listens all the time, so that a receiver that gives up or dies is heard at once."""

    max_batch = 4
    wait_s = 0.0

    def __init__(self, wire: Wire, worker: str, offload: Offload[Any]) -> None:
        self._wire = wire
        self._worker = worker
        self._offload = offload
        self._jobs: set[asyncio.Future[Any]] = set()
        self._messages: asyncio.Queue[tuple[Kind, Any]] = asyncio.Queue()
        self._listener = asyncio.create_task(self._listen(), name="kv-answers")

    async def begin(self, ticket: Ticket) -> None:
        """Presents the ticket and waits until the receiver has looked at it."""
        await self._send(Kind.OPEN, json.dumps(ticket_json(ticket)).encode())
        kind, said = await self._message()
        if kind is not Kind.ADMITTED:
            raise _early(said)

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> list[tuple[bytes, Sequence[memoryview]]]:
        """Headers and payloads."""
        self._check()
        job = asyncio.ensure_future(self._offload(lambda: [(f.header(), f.runs()) for f in frames]))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.shield(job)

    async def post(self, prepared: list[tuple[bytes, Sequence[memoryview]]]) -> None:
        """The socket holds it up while the receiver is behind."""
        for header, runs in prepared:
            self._check()
            await self._send(Kind.FRAME, header, runs)

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        """Commits and waits for the answer."""
        said = {"num_frames": num_frames, "first_token": asdict(first_token)}
        await self._send(Kind.COMMIT, json.dumps(said).encode())
        _, answer = await self._message()
        return answer_of(answer)

    async def close(self) -> None:
        """Ends the write; nothing reads the cache when it returns. Idempotent."""
        try:
            if self._jobs:
                await asyncio.wait([*self._jobs])
        finally:
            self._listener.cancel()
            await asyncio.wait([self._listener])
            self._wire.close()

    def _check(self) -> None:
        """Raises what has ended the write, if anything has."""
        if not self._messages.empty():
            raise _early(self._messages.get_nowait()[1])
        if self._listener.done():
            raise self._lost()

    async def _send(self, kind: Kind, head: bytes, runs: Sequence[memoryview] = ()) -> None:
        try:
            await self._wire.send(kind, head, runs)
        except OSError as error:
            # What the receiver said before it ended is still to be heard.
            await asyncio.wait([self._listener])
            self._check()
            raise self._lost() from error

    async def _message(self) -> tuple[Kind, Any]:
        hearing = asyncio.ensure_future(self._messages.get())
        try:
            await asyncio.wait([hearing, self._listener], return_when=asyncio.FIRST_COMPLETED)
            if self._messages.empty() and not hearing.done():
                raise self._lost()
            return await hearing
        finally:
            hearing.cancel()

    async def _listen(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                self._messages.put_nowait(await self._wire.hear())

    def _lost(self) -> PeerLost:
        return PeerLost(f"the transfer to {self._worker} ended without an answer")


def _early(said: dict[str, Any]) -> AnsweredEarly:
    answer = answer_of(said)
    assert not isinstance(answer, Resend), "nothing was committed yet"
    return AnsweredEarly(answer)


async def _connect(address: str, worker: str) -> Wire:
    try:
        return await Wire.connect(address)
    except OSError as error:
        raise PeerLost(f"cannot connect to {worker}") from error
