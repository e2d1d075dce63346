"""Which faults a run deals, and where there is a way left around them.

A deck is every kind of fault once, with victims drawn, in an order drawn from the seed: first one of each
link and one of each role, so that a short run has had them. Which of a deck strikes first depends on who is
busy, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from benchmarks.chaos.census import GCS, REDIS
from benchmarks.chaos.faults import (
    CLIENT_ROUTER,
    CUT,
    DRIP,
    HOLE,
    HOLE_DOWN,
    HOLE_UP,
    LATENCY,
    LONG_HOLE,
    PREFILL_DECODE,
    ROUTER_DECODE,
    ROUTER_PREFILL,
    Fault,
    Kill,
    Link,
    OnControlPlane,
    Pause,
    Restart,
    Spoil,
    Toxic,
    kill_and_wait,
    pausing,
)
from benchmarks.chaos.rig import CLIENT, DECODE, PREFILL, ROUTERS, Rig
from benchmarks.chaos.sight import Edge

# SIGSTOP: noticed by nobody, longer than the silence that ends a session, longer than a lease.
PAUSES_S = (0.5, 3.0, 11.0)
REDIS_PAUSE_S = 5.0
GCS_PAUSES_S = (5.0, 20.0)
SCALED_WITHIN_S = 90.0

Deck = Callable[[random.Random], list[Fault]]
_Item = TypeVar("_Item")


def lesser(*, ray: bool, links: bool = True) -> Deck:
    """Every fault after which all processes are still there: links, stops, the control plane.

    ray: there is a Ray whose server can be stopped.  links: KV and sessions may be disturbed too.
    """

    def deal(rng: random.Random) -> list[Fault]:
        groups = [_stops(role, rng) for role in (ROUTERS, PREFILL, DECODE)]
        rest: list[Fault] = []
        if links:
            groups += [
                _on_link(CLIENT_ROUTER, rng, HOLE),
                _on_link(ROUTER_PREFILL, rng, HOLE),
                _on_link(ROUTER_DECODE, rng, HOLE),
                _on_link(PREFILL_DECODE, rng, HOLE, LONG_HOLE),
            ]
            rest += _on_redis()
        if links and ray:
            rest += _on_gcs(rng)
        first = [group.pop(rng.randrange(len(group))) for group in groups]
        rest += [fault for group in groups for fault in group]
        return [*_shuffled(first, rng), *_shuffled(rest, rng)]

    return deal


def greater(*, is_scaled: bool) -> Deck:
    """Every fault that ends a process: two kills and a planned restart of each role; or scales one."""

    def deal(rng: random.Random) -> list[Fault]:
        roles = [_shuffled(role, rng) for role in (ROUTERS, PREFILL, DECODE)]
        kills: list[Fault] = [Kill(role[0]) for role in roles]
        restarts: list[Fault] = [Restart(rng.choice(role)) for role in roles]
        rest: list[Fault] = [Kill(role[1]) for role in roles]
        if is_scaled:
            rest.append(_scaling(rng.choice(("prefill", "decode"))))
        return [fault for part in (kills, restarts, rest) for fault in _shuffled(part, rng)]

    return deal


def leave_a_way(broken: Set[Edge]) -> bool:
    """Whether a router is left, and each that is reaches a prefill and a decode worker that reach each other.

    Without one a request runs out of attempts within a few seconds.
    """
    left = [router for router in ROUTERS if broken.isdisjoint({(router, router), (CLIENT, router)})]
    return bool(left) and all(
        any(
            broken.isdisjoint({(p, p), (d, d), (router, p), (router, d), (p, d)})
            for p in PREFILL
            for d in DECODE
        )
        for router in left
    )


def _shuffled(items: Sequence[_Item], rng: random.Random) -> list[_Item]:
    return rng.sample(items, len(items))


def _stops(role: Sequence[str], rng: random.Random) -> list[Fault]:
    return [Pause(rng.choice(role), seconds) for seconds in PAUSES_S]


def _on_link(link: Link, rng: random.Random, *holes: Toxic) -> list[Fault]:
    toxics = (CUT, *holes, rng.choice((HOLE_UP, HOLE_DOWN)), LATENCY, DRIP)
    return [Spoil(toxic, link, rng.choice(link.targets)) for toxic in toxics]


def _on_redis() -> list[Fault]:
    return [
        OnControlPlane("redis killed", REDIS, kill_and_wait),
        OnControlPlane(f"redis stopped {REDIS_PAUSE_S:g} s", REDIS, pausing(REDIS_PAUSE_S)),
    ]


def _on_gcs(rng: random.Random) -> list[Fault]:
    seconds = rng.choice(GCS_PAUSES_S)
    return [OnControlPlane(f"gcs stopped {seconds:g} s", GCS, pausing(seconds))]


def _scaling(role: str) -> Fault:
    async def up_and_down(rig: Rig, _name: str) -> None:
        await rig.scale(role, 3, SCALED_WITHIN_S)
        await rig.scale(role, 2, SCALED_WITHIN_S)

    return OnControlPlane(f"scale {role} up and down", f"scale {role}", up_and_down)
