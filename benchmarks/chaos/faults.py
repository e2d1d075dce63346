"""The faults of a chaos run: a table of what may be done to a process, to a link, or to the control plane.

A fault first takes aim: it waits until work is in flight at its victim, because one that strikes nothing
proves nothing. It strikes, and is lifted before strike() returns. When, and in which order, is the storm's
affair.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.chaos.load import Load
from benchmarks.chaos.rig import CLIENT, DECODE, PREFILL, ROUTERS, Rig
from benchmarks.chaos.sight import Edge
from benchmarks.chaos.tcp_proxy import TcpProxy


class Fault(Protocol):
    """One fault with its victim drawn."""

    @property
    def kind(self) -> str:
        """Its row in the table."""

    def aim(self, rig: Rig) -> Edge | None:
        """The edge that it would strike now; None while nothing is in flight there."""

    @property
    def is_breaking(self) -> bool:
        """Whether no attempt gets through there meanwhile."""

    async def strike(self, rig: Rig, edge: Edge) -> None:
        """Does it, and undoes it."""

    def noticed_at(self, rig: Rig, load: Load, edge: Edge, since: float) -> float | None:
        """When somebody who could still place work there first knew, after since, that it is lost."""

    async def recover(self, rig: Rig, edge: Edge, within_s: float) -> None:
        """Waits until what was struck is of use again."""


@dataclass(frozen=True, slots=True)
class _OnProcess:
    """What strikes a whole process."""

    victim: str

    @property
    def role(self) -> str:
        """Of the victim."""
        return self.victim.partition("-")[0]

    def aim(self, rig: Rig) -> Edge | None:
        """The process itself, while it has work."""
        is_busy = (
            rig.sight.num_requests(self.victim) > 0
            if self.victim in ROUTERS
            else any(rig.num_attempts(router, self.victim) > 0 for router in rig.routers_awake)
        )
        return (self.victim, self.victim) if is_busy else None

    @property
    def is_breaking(self) -> bool:
        """Whether no attempt gets through there meanwhile."""
        return True

    def noticed_at(self, rig: Rig, load: Load, edge: Edge, since: float) -> float | None:
        """When a client turned from the router, or a router lost the worker."""
        if self.victim in ROUTERS:
            return load.turned_at(self.victim, since)
        return rig.sight.lost_at(edge, ROUTERS, since)

    async def recover(self, rig: Rig, _edge: Edge, within_s: float) -> None:
        """Waits until the router has workers, or all routers have the worker."""
        if self.victim in ROUTERS:
            await rig.wait_able(self.victim, within_s)
        else:
            await rig.wait_whole([self.victim], within_s)


@dataclass(frozen=True, slots=True)
class Kill(_OnProcess):
    """SIGKILL; the process is started again."""

    @property
    def kind(self) -> str:
        """Its row in the table."""
        return f"kill {self.role}"

    async def strike(self, rig: Rig, _edge: Edge) -> None:
        """Does it, and undoes it."""
        await rig.end(self.victim, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Restart(_OnProcess):
    """SIGTERM, as in a rolling restart: the process ends what it has, leaves, and is started again."""

    @property
    def kind(self) -> str:
        """Its row in the table."""
        return f"restart {self.role}"

    async def strike(self, rig: Rig, _edge: Edge) -> None:
        """Does it, and undoes it."""
        await rig.end(self.victim, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Pause(_OnProcess):
    """SIGSTOP, and SIGCONT some seconds later."""

    seconds: float

    @property
    def kind(self) -> str:
        """Its row in the table."""
        return f"stop {self.role} {self.seconds:g} s"

    async def strike(self, rig: Rig, _edge: Edge) -> None:
        """Does it, and undoes it."""
        with rig.stopped(self.victim):
            await asyncio.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Link:
    """The connections between two roles, which the proxies of the targets carry."""

    name: str
    peers: Sequence[str]
    targets: Sequence[str]


CLIENT_ROUTER = Link("client->router", (CLIENT,), ROUTERS)
ROUTER_PREFILL = Link("router->prefill", ROUTERS, PREFILL)
ROUTER_DECODE = Link("router->decode", ROUTERS, DECODE)
PREFILL_DECODE = Link("prefill->decode", PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class Toxic:
    """What a link may suffer, and for how many seconds."""

    name: str
    seconds: float
    begin: Callable[[TcpProxy, str], None]


CUT = Toxic("cut", 1.0, lambda proxy, peer: proxy.cut(peer))
HOLE = Toxic("hole 3 s", 3.0, lambda proxy, peer: proxy.timeout(peer))
LONG_HOLE = Toxic("hole 11 s", 11.0, lambda proxy, peer: proxy.timeout(peer))
HOLE_UP = Toxic("hole up 3 s", 3.0, lambda proxy, peer: proxy.timeout(peer, ["up"]))
HOLE_DOWN = Toxic("hole down 3 s", 3.0, lambda proxy, peer: proxy.timeout(peer, ["down"]))
LATENCY = Toxic("latency", 1.5, lambda proxy, peer: proxy.latency(0.05, peer, jitter_s=0.2))
# A prompt of 1,400 tokens and its KV of half a megabyte take a second and a minute.
DRIP = Toxic("drip", 1.5, lambda proxy, peer: proxy.bandwidth(8_000, peer))


@dataclass(slots=True)
class Spoil:
    """A toxic on the link between one target and whichever of the peers is busy there."""

    toxic: Toxic
    link: Link
    target: str
    _num_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Its row in the table."""
        return f"{self.toxic.name} {self.link.name}"

    def aim(self, rig: Rig) -> Edge | None:
        """The link from the first peer that is busy there."""
        busy = (peer for peer in self.link.peers if self._is_busy(rig, peer))
        return next(((peer, self.target) for peer in busy), None)

    @property
    def is_breaking(self) -> bool:
        """Whether no attempt gets through there meanwhile."""
        return self.toxic is not LATENCY

    async def strike(self, rig: Rig, edge: Edge) -> None:
        """Does it, and undoes it."""
        peer = edge[0]
        proxy = rig.proxy(self.target)
        assert proxy is not None
        self.toxic.begin(proxy, peer)
        try:
            await asyncio.sleep(self.toxic.seconds)
        finally:
            proxy.heal(peer)

    def noticed_at(self, rig: Rig, load: Load, edge: Edge, since: float) -> float | None:
        """When the near end, or for KV a router, gave the far end up."""
        peer = edge[0]
        if peer == CLIENT:
            return load.turned_at(self.target, since)
        if peer in ROUTERS:
            return rig.sight.lost_at((self.target, self.target), [peer], since)
        return rig.sight.lost_at(edge, ROUTERS, since)

    async def recover(self, rig: Rig, edge: Edge, within_s: float) -> None:
        """Waits until the link carries work again; clients connect anew for each question."""
        peer = edge[0]
        if peer in ROUTERS:
            await rig.wait_whole([self.target], within_s, [peer])
        elif peer in PREFILL:
            await rig.wait_whole([peer, self.target], within_s)

    def _is_busy(self, rig: Rig, peer: str) -> bool:
        """Whether work is on the link now; of KV, whether bytes have moved since the last look."""
        proxy = rig.proxy(self.target)
        if proxy is None or not proxy.of(peer):
            return False
        if peer == CLIENT:
            return rig.sight.num_requests(self.target) > 0
        if peer in ROUTERS:
            return rig.num_attempts(peer, self.target) > 0
        num_bytes = sum(connection.num_bytes["up"] for connection in proxy.of(peer))
        num_before = self._num_bytes.get(peer, num_bytes)
        self._num_bytes[peer] = num_bytes
        return num_bytes > num_before


@dataclass(frozen=True, slots=True)
class OnControlPlane:
    """What strikes nobody who serves: Redis, Ray's own server, or the number of workers.

    name: whose process, or which role; its edge, so that no other fault has it meanwhile.
    """

    kind: str
    name: str
    act: Callable[[Rig, str], Awaitable[None]]

    def aim(self, rig: Rig) -> Edge | None:
        """The process or the role, while any router has requests."""
        is_busy = any(rig.sight.num_requests(router) for router in ROUTERS)
        return (self.name, self.name) if is_busy else None

    @property
    def is_breaking(self) -> bool:
        """Whether no attempt gets through there meanwhile."""
        return False

    async def strike(self, rig: Rig, _edge: Edge) -> None:
        """Does it, and undoes it."""
        await self.act(rig, self.name)

    def noticed_at(self, _rig: Rig, _load: Load, _edge: Edge, _since: float) -> None:
        """Nobody who serves need know."""

    async def recover(self, _rig: Rig, _edge: Edge, _within_s: float) -> None:
        """Nobody who serves was struck, so nobody is waited for."""


async def kill_and_wait(rig: Rig, name: str) -> None:
    """SIGKILL, until another process has the name. Whoever calls it sets a limit."""
    os.kill(rig.pid(name), signal.SIGKILL)
    while True:
        await asyncio.sleep(0.5)
        with suppress(KeyError):
            rig.pid(name)
            return


def pausing(seconds: float) -> Callable[[Rig, str], Awaitable[None]]:
    """SIGSTOP for so long."""

    async def pause(rig: Rig, name: str) -> None:
        pid = rig.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return pause
