"""A network of calls between nodes, on virtual time: ordered streams that can stall, lose and break.

Owns links (latency, faults), connections and what a kernel does for a process: it
answers for one that is dead, and takes bytes for one that is paused. Must not know what
the bytes mean.

Within one direction of one connection nothing is ever reordered, skipped or repeated:
where bytes are lost, the connection is lost with them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.virtual_loop import NOBODY, Process, State

# What a receiver's kernel takes before the sender has to wait.
WINDOW_BYTES = 64 * 1024


class Link:
    """One direction between two nodes."""

    def __init__(self, latency_s: float, rng: random.Random) -> None:
        self.extra_s = 0.0
        self.is_clogged = False
        self.is_silent = False
        self.is_cut = False
        self._latency_s = latency_s
        self._rng = rng
        self._stalled: dict[Pipe, None] = {}

    def delay_s(self) -> float:
        """Time the next message takes."""
        return self._latency_s * self._rng.uniform(0.5, 1.5) + self.extra_s

    def stall(self, pipe: Pipe) -> None:
        self._stalled[pipe] = None

    def heal(self) -> None:
        """What was held back goes on in order; a stream that has lost something breaks."""
        self.extra_s, self.is_clogged, self.is_silent = 0.0, False, False
        stalled, self._stalled = list(self._stalled), {}
        for pipe in stalled:
            pipe.go_on()


class Pipe:
    """One direction of one connection.

    deliver: called, outside any process, with each item when it arrives.
    lost: called at the heal of a link that swallowed something of this stream.
    """

    def __init__(self, link: Link, deliver: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self.num_waiting_bytes = 0
        self.window_bytes = WINDOW_BYTES
        self._link = link
        self._deliver = deliver
        self._lost = lost
        self._backlog: deque[Any] = deque()
        self._has_lost = False
        self._last_at = 0.0
        self._room: asyncio.Future[None] | None = None

    async def send(self, item: Any, num_bytes: int) -> None:
        """Sends once there is room; one sender at a time."""
        while self.num_waiting_bytes > 0 and self.num_waiting_bytes + num_bytes > self.window_bytes:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self.num_waiting_bytes += num_bytes
        self.push(item)

    def push(self, item: Any) -> None:
        """Sends without asking for room."""
        if self._link.is_cut or self._has_lost:
            return
        if self._link.is_silent:
            self._has_lost = True
            self._link.stall(self)
        elif self._link.is_clogged or self._backlog:
            self._backlog.append(item)
            self._link.stall(self)
        else:
            self._schedule(item)

    def consumed(self, num_bytes: int) -> None:
        """The receiver has read that much."""
        self.num_waiting_bytes -= num_bytes
        self.wake()

    def wake(self) -> None:
        """Lets a waiting sender look again."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def go_on(self) -> None:
        backlog, self._backlog = self._backlog, deque()
        if self._has_lost:
            self._lost()
            return
        for item in backlog:
            self._schedule(item)

    def _schedule(self, item: Any) -> None:
        loop = asyncio.get_running_loop()
        # Timers of the same time fire in any order; items of one stream must not.
        self._last_at = max(self._last_at + 1e-6, loop.time() + self._link.delay_s())
        loop.call_at(self._last_at, self._deliver, item, context=NOBODY)


class End:
    """One end of a connection: what has arrived, and whether it is over."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.out: Pipe
        self.into: Pipe
        self.arrived: deque[Any] = deque()
        self.over: Any = None
        # Called, outside any process, when the end is over.
        self.on_over: Callable[[Any], None] = lambda reason: None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Any:
        """The next item; the reason of the end once nothing is left."""
        while not self.arrived:
            if self.over is not None:
                return self.over
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.arrived.popleft()

    def arrive(self, item: Any) -> None:
        if self.over is None:
            self.arrived.append(item)
            self._wake()

    def finish(self, reason: Any) -> None:
        """Nothing more arrives, and nothing can be sent. Idempotent."""
        if self.over is None:
            self.over = reason
            self._wake()
            self.out.num_waiting_bytes = 0
            self.out.wake()
            self.on_over(reason)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Over:
    """How a connection ended, as the other end is told."""

    def __init__(self, code: str, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.code = code
        self.details = details
        self.metadata = metadata


RESET = Over("UNAVAILABLE", "connection reset")
REFUSED = Over("UNAVAILABLE", "connection refused")
CANCELLED = Over("CANCELLED", "the caller hung up")


class Connection:
    """One call from one process to another."""

    def __init__(self, net: Network, number: int, kind: str, caller: Process, server: str) -> None:
        self.kind = kind
        self.number = number
        self.names = (caller.name, server)
        self._net = net
        self._is_accepted = False
        self.caller = End(caller)
        # Whoever is at that address when the call arrives; nobody yet.
        self.server = End(Process(server))
        up, down = net.link(caller.name, server), net.link(server, caller.name)
        self.caller.out = self.server.into = Pipe(up, self._up, self.reset)
        self.server.out = self.caller.into = Pipe(down, self._down, self.reset)

    @property
    def is_over(self) -> bool:
        return self.caller.over is not None and self.server.over is not None

    def reset(self) -> None:
        """Breaks both directions at once."""
        self.caller.finish(RESET)
        self.server.finish(RESET)
        self._net.forget(self)

    def hang_up(self, end: End, reason: Over) -> None:
        """This end leaves; the other hears of it in its turn."""
        if end.over is None:
            end.finish(reason)
            end.out.push(reason)
            self._net.forget(self)

    def _up(self, item: Any) -> None:
        if self.server.over is not None:
            # Broken before it got here.
            pass
        elif not self._is_accepted:
            self._is_accepted = True
            self._net.accept(self, item)
        else:
            self._arrive(self.server, item)

    def _down(self, item: Any) -> None:
        self._arrive(self.caller, item)

    def _arrive(self, end: End, item: Any) -> None:
        if isinstance(item, Over):
            end.finish(item)
            self._net.forget(self)
        elif end.process.state is not State.DEAD:
            end.arrive(item)

    def reset_by_the_living(self) -> None:
        """Something runs again where an end of this connection died."""
        for end, other in ((self.caller, self.server), (self.server, self.caller)):
            if end.process.state is State.DEAD and other.process.state is not State.DEAD:
                other.into.push(RESET)


class Network:
    """All links and connections.

    latency: of a link between two nodes, in seconds.
    """

    def __init__(self, latency: Callable[[str, str], float], seed: str) -> None:
        self._latency = latency
        self._seed = seed
        self._links: dict[tuple[str, str], Link] = {}
        self._connections: dict[int, Connection] = {}
        self._num_connections = 0
        self._listening: dict[str, tuple[Process, Callable[[Connection, Any], None]]] = {}
        # Machines that are off: not even a kernel answers.
        self._gone: dict[str, None] = {}

    def close(self) -> None:
        """Nothing arrives any more."""
        for link in self._links.values():
            link.is_cut = True

    def link(self, source: str, target: str) -> Link:
        """The one direction from source to target."""
        key = (source, target)
        if key not in self._links:
            rng = random.Random(f"{self._seed}/link/{source}>{target}")
            self._links[key] = Link(self._latency(source, target), rng)
        return self._links[key]

    def heal(self) -> None:
        """All links work again."""
        for link in list(self._links.values()):
            link.heal()

    def listen(self, process: Process, accept: Callable[[Connection, Any], None]) -> None:
        """Calls to this name go to this process; accept is called outside any process."""
        self._listening[process.name] = (process, accept)
        self._gone.pop(process.name, None)
        # The next probe of a connection that a former life had is answered with a reset.
        for connection in self.connections_of(process.name):
            connection.reset_by_the_living()

    def is_up(self, name: str) -> bool:
        """Whether anything runs at that name, paused or not."""
        return name in self._listening and self._listening[name][0].state is not State.DEAD

    def call(self, kind: str, caller: Process, server: str, opening: Any) -> Connection:
        """A new call; it arrives, or is refused, one latency later."""
        self._num_connections += 1
        connection = Connection(self, self._num_connections, kind, caller, server)
        self._connections[connection.number] = connection
        connection.caller.out.push(opening)
        return connection

    def connections_of(self, name: str) -> list[Connection]:
        """Open connections with that node at either end, oldest first."""
        return [c for c in self._connections.values() if name in c.names]

    def between(self, one: str, other: str) -> list[Connection]:
        """Open connections between two nodes."""
        return [c for c in self._connections.values() if set(c.names) == {one, other}]

    def num_open(self, kind: str) -> int:
        """Open calls of a kind."""
        return sum(c.kind == kind for c in self._connections.values())

    def forget(self, connection: Connection) -> None:
        """Drops a connection that is over at both ends."""
        if connection.is_over:
            self._connections.pop(connection.number, None)

    def kill(self, process: Process, *, silently: bool) -> None:
        """A process died: its kernel resets its connections, unless the machine died too."""
        if silently:
            self._gone[process.name] = None
        for connection in self.connections_of(process.name):
            for end, other in (
                (connection.caller, connection.server),
                (connection.server, connection.caller),
            ):
                if end.process is process and end.over is None:
                    end.over = RESET
                    if not silently:
                        end.out.push(RESET)
                    if other.over is not None:
                        self.forget(connection)

    def accept(self, connection: Connection, opening: Any) -> None:
        """The opening of a call has arrived: somebody takes it, or the kernel refuses it."""
        name = connection.names[1]
        if self.is_up(name):
            connection.server.process, accept = self._listening[name]
            accept(connection, opening)
        elif name in self._gone:
            connection.server.process.kill()
        else:
            connection.server.over = REFUSED
            connection.caller.into.push(REFUSED)
