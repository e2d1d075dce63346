"""Sessions over gRPC streams: the production side of the Session port.

Owns the outbox, the liveness clock and the translation of a broken stream to
PeerLost. Knows nothing about what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import grpc

from baton.errors import BatonError, Draining, IncompatiblePeer, PeerLost
from baton.logs import get_logger
from baton.ports import Session
from baton.rpc import translate

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")

log = get_logger(__name__)

HEARTBEAT_INTERVAL_S = 0.25
SILENCE_S = 2.0
# Room for a burst of token events while the peer's window is full. A peer that
# lags further than this is no longer keeping up and is treated as lost.
OUTBOX_MESSAGES = 4096


def send_unless_ended(session: Session[SendT, Any], message: SendT) -> None:
    """Sends an event; one for a session that has ended is dropped, as whoever serves it cleans up."""
    try:
        session.send(message)
    except PeerLost as error:
        log.debug("event not sent", peer=session.peer, reason=error.message)


class StreamSession(Generic[SendT, RecvT]):
    """A Session over one end of a gRPC bidirectional stream.

    peer: name of the other end, for messages to people.
    incoming: the peer's messages.
    write: sends one message, waiting for flow control.
    hang_up: ends the stream at the transport.

    Use as `async with`: leaving it ends the stream and its writer task.
    """

    def __init__(
        self,
        peer: str,
        incoming: AsyncIterator[RecvT],
        write: Callable[[SendT], Awaitable[None]],
        hang_up: Callable[[], object],
    ) -> None:
        self._peer = peer
        self._incoming = incoming
        self._write = write
        self._hang_up = hang_up
        self._outbox: asyncio.Queue[SendT] = asyncio.Queue(OUTBOX_MESSAGES)
        self._closed = False
        self._overflowed = False
        self._writer = asyncio.create_task(self._drain(), name=f"session-writer-{peer}")
        self._last_received = asyncio.get_running_loop().time()

    @property
    def peer(self) -> str:
        """Name of the peer."""
        return self._peer

    @property
    def last_received(self) -> float:
        """Loop time of the last message received, in seconds."""
        return self._last_received

    def send(self, message: SendT) -> None:
        """Queues a message; raises PeerLost if the session ended or its outbox is full."""
        if self._closed or self._writer.done():
            raise PeerLost(f"the session with {self._peer} has ended")
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflowed = True
            self._shut()
            raise self._lost_by_overflow() from None

    async def __aiter__(self) -> AsyncIterator[RecvT]:
        """The peer's messages; raises PeerLost when the stream breaks or ends on the other side.

        Raises IncompatiblePeer if the peer ended the stream because it refuses this process, and Draining if
        it is leaving.
        """
        try:
            async for message in self._incoming:
                self._last_received = asyncio.get_running_loop().time()
                yield message
        except grpc.RpcError as error:
            if not self._closed:
                raise self._broken(error) from error
        except asyncio.CancelledError:
            # gRPC raises this too when the call is hung up under its reader.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        if self._overflowed:
            raise self._lost_by_overflow()
        if not self._closed:
            raise PeerLost(f"{self._peer} ended the session")

    async def close(self) -> None:
        """Ends the stream and its writer; idempotent."""
        self._shut()
        await asyncio.gather(self._writer, return_exceptions=True)

    async def __aenter__(self) -> StreamSession[SendT, RecvT]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _broken(self, error: grpc.RpcError) -> BatonError:
        failure = translate(error) if isinstance(error, grpc.aio.AioRpcError) else None
        if isinstance(failure, IncompatiblePeer | Draining):
            return failure
        reason = failure.message if failure is not None else str(error)
        return PeerLost(f"the session with {self._peer} broke: {reason}")

    def _lost_by_overflow(self) -> PeerLost:
        return PeerLost(f"{self._peer} does not read: {OUTBOX_MESSAGES} messages are waiting")

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.cancel()
            self._hang_up()

    async def _drain(self) -> None:
        try:
            while True:
                await self._write(await self._outbox.get())
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            # The reading side reports the broken stream; send() sees a finished writer.
            log.debug("session writer ended", peer=self._peer, reason=str(error))
            self._hang_up()


@asynccontextmanager
async def serving_session(
    requests: AsyncIterator[Any], context: Any
) -> AsyncIterator[StreamSession[Any, Any]]:
    """The server's end of a stream as a session. The call ends when its handler returns."""
    # The first write would send it too, and leaving while that write is under way would make gRPC
    # send it twice: the client would never hear of the end.
    await context.send_initial_metadata(())
    async with StreamSession(context.peer(), requests, context.write, lambda: None) as session:
        yield session


async def keep_alive(
    session: Session[SendT, RecvT],
    make_heartbeat: Callable[[], SendT],
    *,
    interval_s: float = HEARTBEAT_INTERVAL_S,
    silence_s: float = SILENCE_S,
) -> None:
    """Sends heartbeats until cancelled; raises PeerLost when the peer has been silent for silence_s.

    Silence is counted in intervals in which nothing came, not in elapsed time:
    a process that was itself stopped for a while must first read what is waiting
    for it before it may call its peers dead.
    """
    allowed = max(1, round(silence_s / interval_s))
    silent, seen = 0, session.last_received
    while True:
        session.send(make_heartbeat())
        await asyncio.sleep(interval_s)
        silent = silent + 1 if session.last_received == seen else 0
        seen = session.last_received
        if silent >= allowed:
            raise PeerLost(f"{session.peer} has been silent for {silence_s:g} s")


async def converse(
    session: Session[SendT, RecvT],
    incoming: AsyncIterator[RecvT],
    handle: Callable[[RecvT], None],
    make_heartbeat: Callable[[], SendT],
) -> None:
    """Handles every message and keeps the session alive until it ends.

    incoming: the session's iterator, after the opening messages were taken from it.
    Raises PeerLost when the peer is gone, and whatever handle raises.
    """
    heartbeat = asyncio.create_task(keep_alive(session, make_heartbeat), name=f"heartbeat-{session.peer}")
    reader = asyncio.create_task(_read(incoming, handle), name=f"reader-{session.peer}")
    try:
        done, _ = await asyncio.wait((reader, heartbeat), return_when=asyncio.FIRST_COMPLETED)
        # What the peer said weighs more than that the heartbeat could not be sent to it any more.
        for task in (reader, heartbeat):
            if task in done:
                task.result()
    finally:
        heartbeat.cancel()
        reader.cancel()
        # Both may end with PeerLost at once; the first was raised, the second says nothing new.
        await asyncio.gather(heartbeat, reader, return_exceptions=True)


async def _read(incoming: AsyncIterator[RecvT], handle: Callable[[RecvT], None]) -> None:
    async for message in incoming:
        handle(message)


async def first_message(incoming: AsyncIterator[RecvT], peer: str, timeout_s: float = 5.0) -> RecvT:
    """The next message of a session that is being opened; raises PeerLost if none comes in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(incoming)
    except (TimeoutError, StopAsyncIteration):
        raise PeerLost(f"{peer} did not introduce itself within {timeout_s:g} s") from None
