"""A TCP proxy that can be told to misbehave, for real processes under test.

Its toxics are named as in Toxiproxy where that has them. Each is for one peer, as `name_peer` names
whoever connects, or for EVERYBODY; where it makes sense, for one direction only. "up" is towards the target.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

Direction = Literal["up", "down"]
BOTH: tuple[Direction, ...] = ("up", "down")
EVERYBODY = "*"
LOOPBACK = "127.0.0.1"

_READ_BYTES = 1 << 16
# What may be under way in one direction; a sender that is faster has to wait, as it does for TCP's window.
_MAX_CHUNKS_UNDER_WAY = 16
# How long a piece of a slow stream takes: the shorter, the steadier it drips.
_DRIP_S = 0.05
# Closing a socket that lingers for zero seconds sends a reset instead of an end.
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toxics:
    """What the bytes of one direction suffer: a hole, a delay in seconds, a rate in bytes per second."""

    is_held: bool = False
    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = math.inf

    def worse(self, other: Toxics) -> Toxics:
        """Both at once."""
        return Toxics(
            is_held=self.is_held or other.is_held,
            latency_s=max(self.latency_s, other.latency_s),
            jitter_s=max(self.jitter_s, other.jitter_s),
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s),
        )


_NO_TOXICS = Toxics()


@dataclass(eq=False)
class Connection:
    """One proxied connection. num_bytes: what got through."""

    peer: str
    writers: list[asyncio.StreamWriter]
    pipes: list[asyncio.Task[None]] = field(default_factory=list)
    num_bytes: dict[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def reset(self) -> None:
        """Ends it at both ends, without a goodbye."""
        for writer in self.writers:
            _reset(writer)
        for pipe in self.pipes:
            pipe.cancel()


class TcpProxy:
    """Listens on loopback; `async with TcpProxy(target_port) as proxy: proxy.address`.

    target_port: where connections go on to, at 127.0.0.1; nobody need listen there yet.
    name_peer: names who connects, from the port it connects from.
    host, port: where to listen; port 0 takes a free one. Another address of loopback has ports of its own.
    """

    def __init__(
        self,
        target_port: int,
        name_peer: Callable[[int], str] = lambda _port: "",
        *,
        host: str = LOOPBACK,
        port: int = 0,
    ) -> None:
        self.connections: set[Connection] = set()
        self._target_port = target_port
        self._name_peer = name_peer
        self._host = host
        self._port = port
        self._cut: set[str] = set()
        self._toxics: dict[tuple[str, Direction], Toxics] = {}
        self._changed = asyncio.Event()
        self._rng = random.Random(target_port)
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Where it listens, host:port."""
        assert self._server is not None
        return f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    def of(self, peer: str) -> list[Connection]:
        """The open connections of a peer."""
        return [c for c in self.connections if peer in (EVERYBODY, c.peer)]

    def reset_peer(self, peer: str = EVERYBODY) -> None:
        """Resets the open connections at both ends; new ones are let through."""
        for connection in self.of(peer):
            connection.reset()

    def cut(self, peer: str = EVERYBODY) -> None:
        """Resets the open connections, and every new one at once, until heal()."""
        self._cut.add(peer)
        self.reset_peer(peer)

    def timeout(self, peer: str = EVERYBODY, directions: Iterable[Direction] = BOTH) -> None:
        """A black hole: nothing gets through, not even an end, and nobody is told, until heal().

        What is sent meanwhile stays unread and arrives then, as TCP would retransmit it.
        """
        self._suffer(peer, directions, is_held=True)

    def latency(
        self,
        seconds: float,
        peer: str = EVERYBODY,
        directions: Iterable[Direction] = BOTH,
        *,
        jitter_s: float = 0.0,
    ) -> None:
        """Delays what is read from now on by seconds and up to jitter_s more; the order is kept.

        A delay, not a brake: what is sent in one go arrives in one go.
        """
        self._suffer(peer, directions, latency_s=seconds, jitter_s=jitter_s)

    def bandwidth(
        self, bytes_per_s: float, peer: str = EVERYBODY, directions: Iterable[Direction] = BOTH
    ) -> None:
        """Each connection drips through, in small pieces, at this rate."""
        self._suffer(peer, directions, bytes_per_s=bytes_per_s)

    def heal(self, peer: str = EVERYBODY) -> None:
        """Ends all toxics that name this peer; EVERYBODY ends all there are."""
        self._cut = {name for name in self._cut if peer not in (EVERYBODY, name)}
        self._toxics = {k: toxics for k, toxics in self._toxics.items() if peer not in (EVERYBODY, k[0])}
        self._changed.set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, self._port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset_peer()
        await self._server.wait_closed()

    def _suffer(self, peer: str, directions: Iterable[Direction], **changes: Any) -> None:
        for way in directions:
            self._toxics[peer, way] = replace(self._toxics.get((peer, way), _NO_TOXICS), **changes)

    def _toxics_of(self, link: Connection, way: Direction) -> Toxics:
        own, all_ = (self._toxics.get((name, way), _NO_TOXICS) for name in (link.peer, EVERYBODY))
        return own.worse(all_)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Finding the owner of a socket takes long, and the others' bytes must not wait for it.
        peer = await asyncio.to_thread(self._name_peer, writer.get_extra_info("peername")[1])
        if self._cut & {peer, EVERYBODY}:
            return _reset(writer)
        try:
            target_reader, target_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
        except OSError:
            return _reset(writer)
        link = Connection(peer, [writer, target_writer])
        link.pipes = [
            asyncio.create_task(self._pipe(link, "up", reader, target_writer)),
            asyncio.create_task(self._pipe(link, "down", target_reader, writer)),
        ]
        self.connections.add(link)
        try:
            await asyncio.wait(link.pipes)
        finally:
            self.connections.discard(link)
            link.reset()

    async def _pipe(
        self, link: Connection, way: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Passes one direction on to its end. A reset at either side is the end of both."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS_UNDER_WAY)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take(link, way, reader, under_way))
                group.create_task(self._deliver(link, way, writer, under_way))
        except* OSError:
            link.reset()

    async def _take(
        self,
        link: Connection,
        way: Direction,
        reader: asyncio.StreamReader,
        under_way: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        """Reads to the end, and notes when each chunk is due."""
        due_at, data = 0.0, b"some"
        while data:
            await self._until_free(link, way)
            data = await reader.read(_READ_BYTES)
            toxics = self._toxics_of(link, way)
            delay_s = toxics.latency_s + self._rng.uniform(0, toxics.jitter_s)
            due_at = max(due_at, asyncio.get_running_loop().time() + delay_s)
            await under_way.put((due_at, data))

    async def _deliver(
        self,
        link: Connection,
        way: Direction,
        writer: asyncio.StreamWriter,
        under_way: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        """Writes each chunk when it is due; the empty one is the end."""
        while True:
            due_at, data = await under_way.get()
            await asyncio.sleep(due_at - asyncio.get_running_loop().time())
            await self._until_free(link, way)
            if not data:
                break
            while data:
                data = data[await self._deliver_piece(link, way, writer, data) :]
        with suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _deliver_piece(
        self, link: Connection, way: Direction, writer: asyncio.StreamWriter, data: bytes
    ) -> int:
        """Writes as much of the data as may pass at once, and takes the time for it; returns how much."""
        await self._until_free(link, way)
        rate = self._toxics_of(link, way).bytes_per_s
        piece = data[: max(1, int(min(rate * _DRIP_S, len(data))))]
        writer.write(piece)
        await writer.drain()
        link.num_bytes[way] += len(piece)
        await asyncio.sleep(len(piece) / rate)
        return len(piece)

    async def _until_free(self, link: Connection, way: Direction) -> None:
        while self._toxics_of(link, way).is_held:
            await self._changed.wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
