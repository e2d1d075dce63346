"""Which faults a run deals, and where there is a way left around them.

A deck is every kind of fault once, with victims drawn, in an order drawn from the seed; when it is dealt out,
the next is shuffled. Which of a deck strikes first depends on who is busy, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Set

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
    Edge,
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

# SIGSTOP: noticed by nobody, longer than the silence that ends a session, longer than a lease.
PAUSES_S = (0.5, 3.0, 11.0)
REDIS_PAUSE_S = 5.0
GCS_PAUSES_S = (5.0, 20.0)
SCALED_WITHIN_S = 90.0

Deck = Callable[[random.Random], list[Fault]]


def lesser(*, ray: bool, links: bool = True) -> Deck:
    """Every fault after which all processes are still there: links, stops, the control plane.

    ray: there is a Ray whose server can be stopped.  links: KV and sessions may be disturbed too.
    """

    def deal(rng: random.Random) -> list[Fault]:
        faults = _stops(rng)
        if links:
            faults += [
                *_on_link(CLIENT_ROUTER, rng, HOLE),
                *_on_link(ROUTER_PREFILL, rng, HOLE),
                *_on_link(ROUTER_DECODE, rng, HOLE),
                *_on_link(PREFILL_DECODE, rng, HOLE, LONG_HOLE),
                *_on_redis(),
            ]
        if links and ray:
            faults += _on_gcs(rng)
        rng.shuffle(faults)
        return faults

    return deal


def greater(*, is_scaled: bool) -> Deck:
    """Every fault that ends a process: two kills and a planned restart of each role; or scales one."""

    def deal(rng: random.Random) -> list[Fault]:
        roles = [rng.sample(role, len(role)) for role in (ROUTERS, PREFILL, DECODE)]
        # One of each role first, so that a short run has had them.
        first: list[Fault] = [Kill(role[0]) for role in roles]
        rest: list[Fault] = [Kill(role[1]) for role in roles] + [Restart(rng.choice(role)) for role in roles]
        if is_scaled:
            rest.append(_scaling(rng.choice(("prefill", "decode"))))
        rng.shuffle(first)
        rng.shuffle(rest)
        return [*first, *rest]

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


def _stops(rng: random.Random) -> list[Fault]:
    return [Pause(rng.choice(role), seconds) for role in (ROUTERS, PREFILL, DECODE) for seconds in PAUSES_S]


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
