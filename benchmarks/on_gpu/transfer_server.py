"""The receiving end of benchmarks/on_gpu/transfer_socket.py: a socket in front of a KvReceiver.

Owns the socket, its connections, and what has arrived. Who may write is the receiver's decision; what becomes
of a lease whose write ended is its listener's.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.errors import IncompatiblePeer
from benchmarks.on_gpu.transfer_wire import Kind, Wire, answer_json, ticket_of, token_of
from kvtransfer.contract import Answer, KvFormat, Resend, Ticket
from kvtransfer.receiver import IncomingWrite, KvReceiver


class SocketServer:
    """Serves writes until it is closed.

    on_ended: called with an attempt once its write has ended, however, and with what went wrong here.
    arrivals: by attempt, (time.monotonic(), bytes) of every frame that was stored.
    hold_after: with so many frames of an attempt stored the next are left in the socket until release().
    """

    def __init__(
        self,
        receiver: KvReceiver[Any],
        path: Path,
        on_ended: Callable[[bytes, BaseException | None], None],
    ) -> None:
        self.address = str(path)
        self.arrivals: dict[bytes, list[tuple[float, int]]] = {}
        self.hold_after: int | None = None
        self._receiver = receiver
        self._on_ended = on_ended
        self._news = asyncio.Event()
        self._writes: set[asyncio.Task[None]] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(self.address)
        self._socket.listen()
        self._acceptor = asyncio.create_task(self._accept(), name="kv-accept")

    async def arrived(self, attempt_id: bytes, num_frames: int) -> None:
        """Waits until so many frames of an attempt are stored."""
        while len(self.arrivals.get(attempt_id, [])) < num_frames:
            await self._next_news()

    def release(self) -> None:
        """What is held is read from here on."""
        self.hold_after = None
        self._tell()

    async def close(self) -> None:
        """Ends all writes. Idempotent."""
        tasks = [self._acceptor, *self._writes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            task = asyncio.create_task(self._serve(Wire(connection)), name="kv-write")
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def _serve(self, wire: Wire) -> None:
        try:
            # The other side is gone, which has its meaning for a write only.
            with suppress(OSError, EOFError):
                kind, said = await wire.hear()
                if kind is Kind.PAIR:
                    await self._pair(wire, KvFormat(**said))
                elif kind is Kind.OPEN:
                    await self._open(wire, ticket_of(said))
        finally:
            wire.close()

    async def _pair(self, wire: Wire, fmt: KvFormat) -> None:
        try:
            self._receiver.check_format(fmt)
        except IncompatiblePeer as error:
            await wire.say(Kind.REFUSED, {"message": error.message, "field": error.field})
        else:
            await wire.say(Kind.PAIRED, {})

    async def _open(self, wire: Wire, ticket: Ticket) -> None:
        # A lease that ends under its write is told with the next frame.
        write = self._receiver.open(ticket, _now(), lambda _gone: None)
        if not isinstance(write, IncomingWrite):
            await wire.say(Kind.ANSWER, answer_json(write))
            return
        failure: BaseException | None = None
        try:
            await wire.say(Kind.ADMITTED, {})
            await self._take(wire, write)
        except (OSError, EOFError):
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            write.close()
            self._on_ended(ticket.attempt_id, failure)

    async def _take(self, wire: Wire, write: IncomingWrite[Any]) -> None:
        arrivals = self.arrivals.setdefault(write.lease.attempt_id, [])
        while True:
            while self.hold_after is not None and len(arrivals) >= self.hold_after:
                await self._next_news()
            kind, head, body = await wire.receive()
            if kind is Kind.FRAME:
                answer: Answer | None = write.frame(head, body, _now())
                if answer is None:
                    arrivals.append((time.monotonic(), body.nbytes))
                    self._tell()
                    # What comes in without a wait must not keep everything else from running.
                    await asyncio.sleep(0)
                    continue
            else:
                said = json.loads(bytes(head))
                answer = write.commit(said["num_frames"], token_of(said["first_token"]), _now())
            await wire.say(Kind.ANSWER, answer_json(answer))
            if not isinstance(answer, Resend):
                return

    async def _next_news(self) -> None:
        await self._news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
