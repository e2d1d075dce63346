"""A TCP proxy that can be told to misbehave, for tests of real processes.

Its toxics are named as in Toxiproxy where that has them. Each is for one peer, as `name_peer` names
whoever connects, or for EVERYBODY; where it makes sense, for one direction only. "up" is towards the target.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self

Direction = Literal["up", "down"]
BOTH: tuple[Direction, ...] = ("up", "down")
EVERYBODY = "*"
LOOPBACK = "127.0.0.1"

_READ_BYTES = 1 << 16
# Closing a socket that lingers for zero seconds sends a reset instead of an end.
_RESET = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Connection:
    """One proxied connection. num_bytes: what got through."""

    peer: str
    writers: list[asyncio.StreamWriter]
    num_bytes: dict[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def reset(self) -> None:
        for writer in self.writers:
            _reset(writer)


class TcpProxy:
    """Listens on a free port of loopback; `async with TcpProxy(target_port) as proxy: proxy.address`.

    target_port: where connections go on to; nobody need listen there yet.
    name_peer: names who connects, from the port it connects from.
    """

    def __init__(self, target_port: int, name_peer: Callable[[int], str] = lambda _port: "") -> None:
        self.connections: set[Connection] = set()
        self._target_port = target_port
        self._name_peer = name_peer
        self._cut: set[str] = set()
        self._held: set[tuple[str, Direction]] = set()
        self._latency_s: dict[tuple[str, Direction], float] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"

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
        """A black hole: nothing gets through, and nobody is told, until heal().

        What was sent meanwhile arrives then, as TCP would retransmit it.
        """
        self._held |= {(peer, direction) for direction in directions}

    def latency(self, seconds: float, peer: str = EVERYBODY, directions: Iterable[Direction] = BOTH) -> None:
        """Delays what passes."""
        self._latency_s |= {(peer, direction): seconds for direction in directions}

    def heal(self, peer: str = EVERYBODY) -> None:
        """Ends all toxics that name this peer; EVERYBODY ends all there are."""
        self._cut = {name for name in self._cut if peer not in (EVERYBODY, name)}
        self._held = {key for key in self._held if peer not in (EVERYBODY, key[0])}
        self._latency_s = {k: s for k, s in self._latency_s.items() if peer not in (EVERYBODY, k[0])}
        self._changed.set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.reset_peer()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = self._name_peer(writer.get_extra_info("peername")[1])
        if self._cut & {peer, EVERYBODY}:
            return _reset(writer)
        try:
            target_reader, target_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
        except OSError:
            return _reset(writer)
        connection = Connection(peer, [writer, target_writer])
        self.connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(connection, "up", reader, target_writer),
                self._pump(connection, "down", target_reader, writer),
            )
        finally:
            self.connections.discard(connection)
            connection.reset()

    async def _pump(
        self, link: Connection, way: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Passes one direction on to its end. A reset at either side is the end of both."""
        try:
            while data := await reader.read(_READ_BYTES):
                await asyncio.sleep(self._delay_s(link.peer, way))
                while self._held & {(link.peer, way), (EVERYBODY, way)}:
                    await self._changed.wait()
                writer.write(data)
                await writer.drain()
                link.num_bytes[way] += len(data)
            with suppress(OSError, RuntimeError):
                writer.write_eof()
        except OSError:
            link.reset()

    def _delay_s(self, peer: str, direction: Direction) -> float:
        return max(self._latency_s.get((name, direction), 0.0) for name in (peer, EVERYBODY))


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
