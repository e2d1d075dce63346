"""The faults of the chaos test: a table of what may be done to a process or to a link.

A fault first takes aim: it waits until work is in flight at its victim, because one that strikes
nothing proves nothing. It strikes, and is lifted before strike() returns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from tests.integration.process_cluster import CLIENT, DECODE, PREFILL, ROUTERS, ProcessCluster
from tests.tcp_proxy import TcpProxy

# A link from one process to another; a process itself is the edge from it to it.
Edge = tuple[str, str]

BUSY_WITHIN_S = 40.0
# SIGSTOP: noticed by nobody, longer than the silence that ends a session, longer than a lease.
PAUSES_S = (0.5, 3.0, 11.0)


class Fault(Protocol):
    """One fault with its victim drawn."""

    @property
    def kind(self) -> str:
        """Its row in the summary."""

    async def aim(self, cluster: ProcessCluster) -> str:
        """Waits until the victim has work in flight and returns its name; for a link, of its near end."""

    def breaks(self, aim: str) -> set[Edge]:
        """What no attempt gets through meanwhile."""

    async def strike(self, cluster: ProcessCluster, aim: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; the process comes back at the same address."""

    victim: str

    @property
    def kind(self) -> str:
        return f"kill {_role(self.victim)}"

    async def aim(self, cluster: ProcessCluster) -> str:
        return await _first_busy({self.victim: _process_is_busy(cluster, self.victim)})

    def breaks(self, aim: str) -> set[Edge]:
        return {(aim, aim)}

    async def strike(self, cluster: ProcessCluster, aim: str) -> None:
        await cluster.kill(aim)


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP, and SIGCONT some seconds later."""

    victim: str
    seconds: float

    @property
    def kind(self) -> str:
        return f"stop {_role(self.victim)} {self.seconds:g} s"

    async def aim(self, cluster: ProcessCluster) -> str:
        return await _first_busy({self.victim: _process_is_busy(cluster, self.victim)})

    def breaks(self, aim: str) -> set[Edge]:
        return {(aim, aim)}

    async def strike(self, cluster: ProcessCluster, aim: str) -> None:
        with cluster.stopped(aim):
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
HOLE_UP = Toxic("hole up", 3.0, lambda proxy, peer: proxy.timeout(peer, ["up"]))
HOLE_DOWN = Toxic("hole down", 3.0, lambda proxy, peer: proxy.timeout(peer, ["down"]))
LATENCY = Toxic("latency", 1.5, lambda proxy, peer: proxy.latency(0.05, peer, jitter_s=0.2))
# A prompt of 1,400 tokens and its KV of half a megabyte take a second and a minute.
DRIP = Toxic("drip", 1.5, lambda proxy, peer: proxy.bandwidth(8_000, peer))


@dataclass(frozen=True, slots=True)
class Spoil:
    """A toxic on the link between one target and whichever of the peers is busy there."""

    toxic: Toxic
    link: Link
    target: str

    @property
    def kind(self) -> str:
        return f"{self.toxic.name} {self.link.name}"

    async def aim(self, cluster: ProcessCluster) -> str:
        peers = {peer: _link_is_busy(cluster, peer, self.target) for peer in self.link.peers}
        return await _first_busy(peers)

    def breaks(self, aim: str) -> set[Edge]:
        return set() if self.toxic is LATENCY else {(aim, self.target)}

    async def strike(self, cluster: ProcessCluster, aim: str) -> None:
        proxy = cluster.proxies[self.target]
        self.toxic.begin(proxy, aim)
        await asyncio.sleep(self.toxic.seconds)
        assert self.toxic is not CUT or not proxy.of(aim)
        proxy.heal(aim)


def series(rng: random.Random) -> dict[str, list[Fault]]:
    """The faults of each series in the order drawn for it; victims are drawn too.

    Each series is about the victims of one role, or about the links on which KV moves.
    """
    drawn = {
        "prefill": [*_on_processes(PREFILL, rng), *_on_link(ROUTER_PREFILL, rng, HOLE)],
        "decode": [*_on_processes(DECODE, rng), *_on_link(ROUTER_DECODE, rng, HOLE)],
        "router": [*_on_processes(ROUTERS, rng), *_on_link(CLIENT_ROUTER, rng, HOLE)],
        "kv": [*_on_link(PREFILL_DECODE, rng, HOLE, LONG_HOLE)],
    }
    for faults in drawn.values():
        rng.shuffle(faults)
    return drawn


def leave_a_way(broken: Set[Edge]) -> bool:
    """Whether each router still has a prefill and a decode worker that it reaches and that reach each other.

    Without one a request runs out of attempts within a few seconds.
    """
    return all(
        any(
            broken.isdisjoint({(p, p), (d, d), (router, p), (router, d), (p, d)})
            for p in PREFILL
            for d in DECODE
        )
        for router in ROUTERS
    )


def _on_processes(names: Sequence[str], rng: random.Random) -> list[Fault]:
    kills = [Kill(name) for name in names]
    return [*kills, *(Pause(rng.choice(names), seconds) for seconds in PAUSES_S)]


def _on_link(link: Link, rng: random.Random, *holes: Toxic) -> list[Fault]:
    toxics = (CUT, *holes, rng.choice((HOLE_UP, HOLE_DOWN)), LATENCY, DRIP)
    return [Spoil(toxic, link, rng.choice(link.targets)) for toxic in toxics]


def _role(name: str) -> str:
    return name.partition("-")[0]


async def _first_busy(candidates: Mapping[str, Callable[[], Awaitable[bool]]]) -> str:
    async with asyncio.timeout(BUSY_WITHIN_S):
        while True:
            for name, is_busy in candidates.items():
                if await is_busy():
                    return name
            await asyncio.sleep(0.005)


def _process_is_busy(cluster: ProcessCluster, name: str) -> Callable[[], Awaitable[bool]]:
    async def is_busy() -> bool:
        if name in ROUTERS:
            return await cluster.num_requests(name) > 0
        return any([await cluster.num_attempts(router, name) > 0 for router in cluster.routers_awake])

    return is_busy


def _link_is_busy(cluster: ProcessCluster, peer: str, target: str) -> Callable[[], Awaitable[bool]]:
    """Whether attempts or requests are on the link now; of KV, whether bytes have moved since this call."""
    proxy = cluster.proxies[target]

    def num_bytes() -> int:
        return sum(connection.num_bytes["up"] for connection in proxy.of(peer))

    num_before = num_bytes()

    async def is_busy() -> bool:
        if not proxy.of(peer):
            return False
        if peer == CLIENT:
            return await cluster.num_requests(target) > 0
        if peer in ROUTERS:
            return await cluster.num_attempts(peer, target) > 0
        return num_bytes() > num_before

    return is_busy
