"""The faults that a seed means: their kinds, and when each happens to whom.

Each part has its own random source, so that another kind of fault changes none of the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULT_PHASE_S = 40.0
LINK_KINDS = ("delay", "reset", "silence", "clog", "partition", "frames")
NODE_KINDS = ("crash", "gone", "pause", "slow")
REGISTRY_KINDS = ("registry_down", "registry_stale", "registry_emptied")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: its cache, and how fast it is."""

    name: str
    role: str
    num_blocks: int
    block_size: int
    layout: str
    dtype: str
    step_s: float
    credit_tokens: int
    # Of the memory that it shares with others there; a decode worker's slots in it.
    host: str = ""
    num_slots: int = 0
    has_digests: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. target: a node, or two nodes of a link; amount: how much of it."""

    at: float
    kind: str
    target: tuple[str, ...]
    lasts_s: float
    amount: float = 0.0

    def __str__(self) -> str:
        where = ">".join(self.target)
        return f"{self.at:7.3f} s  {self.kind} {where} for {self.lasts_s:.3f} s ({self.amount:.3g})"


def draw_faults(
    seed: int, routers: tuple[str, ...], workers: tuple[WorkerPlan, ...], lease_ttl_s: float
) -> tuple[Fault, ...]:
    """All faults of a seed."""
    return (
        _faults(seed, routers, workers, lease_ttl_s)
        + _cuts(seed, workers)
        + _retirements(seed, routers, workers)
    )


def _faults(
    seed: int, routers: tuple[str, ...], workers: tuple[WorkerPlan, ...], lease_ttl_s: float
) -> tuple[Fault, ...]:
    """At least three; a swarm draws which kinds happen at all."""
    rng = random.Random(f"{seed}/faults")
    kinds = [kind for kind in (*LINK_KINDS, *NODE_KINDS, *REGISTRY_KINDS) if rng.random() < 0.5]
    kinds = kinds or ["crash"]
    names = [worker.name for worker in workers]
    faults = [_fault(rng.choice(kinds), routers, names, lease_ttl_s, rng) for _ in range(rng.randint(4, 16))]
    faults += _storm(rng, routers, names) if rng.random() < 0.4 else []
    faults += _naps(rng, names, lease_ttl_s) if rng.random() < 0.3 else []
    faults += _late_renewals(rng, routers, names) if rng.random() < 0.2 else []
    # Nothing would be resumed if nobody died while it had work.
    for role in ("prefill", "decode"):
        at, lasts_s = rng.uniform(5.0, FAULT_PHASE_S - 10), rng.uniform(0.1, 3.0)
        faults.append(Fault(at=at, kind="strike", target=(role,), lasts_s=lasts_s))
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _storm(rng: random.Random, routers: tuple[str, ...], names: list[str]) -> list[Fault]:
    """Slow links, and several quick deaths of what their news would be about."""
    router = rng.choice(routers)
    prefill = rng.choice([name for name in names if name.startswith("prefill")])
    decode = rng.choice([name for name in names if name.startswith("decode")])
    scenes = (
        # Of a commit, even of an answer that is complete, the router has heard from neither side.
        (((decode, router), (prefill, router)), (prefill, router)),
        (((router, prefill),), (decode,)),
        (((prefill, router),), (decode,)),
    )
    links, victims = rng.choice(scenes)
    start, delay_s = rng.uniform(3.0, 20.0), rng.uniform(0.4, 1.6)
    slow = [Fault(at=start, kind="delay", target=link, lasts_s=16.0, amount=delay_s) for link in links]
    return slow + [
        Fault(
            at=start + rng.uniform(1.0, 15.0),
            kind="reset" if len(victims) == 2 else rng.choice(("crash", "gone")),
            target=victims,
            lasts_s=rng.uniform(0.02, 0.2),
        )
        for _ in range(rng.randint(4, 8))
    ]


def _cuts(seed: int, workers: tuple[WorkerPlan, ...]) -> tuple[Fault, ...]:
    """Connections between workers that break again and again, while payloads are on their way into slots."""
    rng = random.Random(f"{seed}/cuts")
    if not any(worker.num_slots for worker in workers) or rng.random() < 0.6:
        return ()
    names = {role: [w.name for w in workers if w.role == role] for role in ("prefill", "decode")}
    return tuple(
        Fault(
            at=rng.uniform(2.0, FAULT_PHASE_S - 2),
            kind="reset",
            target=(rng.choice(names["prefill"]), rng.choice(names["decode"])),
            lasts_s=0.1,
        )
        for _ in range(60)
    )


def _retirements(seed: int, routers: tuple[str, ...], workers: tuple[WorkerPlan, ...]) -> tuple[Fault, ...]:
    """Nodes that are told to leave, with some time, much or none, and come back."""
    rng = random.Random(f"{seed}/retirements")
    if rng.random() < 0.5:
        return ()
    names = [worker.name for worker in workers]
    return tuple(
        Fault(
            at=rng.uniform(2.0, FAULT_PHASE_S - 6),
            kind="retire",
            target=(rng.choice([*names, *names, *routers]),),
            lasts_s=rng.uniform(0.05, 2.0),
            amount=rng.choice((0.0, 0.5, 3.0)),
        )
        for _ in range(rng.randint(1, 5))
    )


def _naps(rng: random.Random, names: list[str], lease_ttl_s: float) -> list[Fault]:
    """Decode workers that sleep a little longer than their leases live."""
    decodes = [name for name in names if name.startswith("decode")]
    return [
        Fault(
            at=rng.uniform(3.0, FAULT_PHASE_S - 3),
            kind="pause",
            target=(rng.choice(decodes),),
            lasts_s=rng.uniform(1.02, 1.4) * lease_ttl_s,
        )
        for _ in range(6)
    ]


def _late_renewals(rng: random.Random, routers: tuple[str, ...], names: list[str]) -> list[Fault]:
    """A router whose heartbeats come in bursts, each too late for a short lease, while prompts take long."""
    start, links = rng.uniform(3.0, 12.0), [(r, d) for r in routers for d in names if d.startswith("decode")]
    late = [
        Fault(at=start + 2.6 * index, kind="delay", target=link, lasts_s=0.5, amount=rng.uniform(1.5, 1.7))
        for index in range(6)
        for link in links
    ]
    return late + [
        Fault(at=start, kind="slow", target=(name,), lasts_s=16.0, amount=rng.uniform(3, 6))
        for name in names
        if name.startswith("prefill")
    ]


def _fault(
    kind: str, routers: tuple[str, ...], workers: list[str], lease_ttl_s: float, rng: random.Random
) -> Fault:
    at, amount = rng.uniform(2.0, FAULT_PHASE_S - 4), 0.0
    lasts_s = rng.choice((rng.uniform(0.05, 0.3), rng.uniform(0.2, 5.0)))
    if kind in LINK_KINDS:
        target = _link(kind, routers, workers, rng)
        short, long = rng.uniform(0.05, 0.8), rng.uniform(1.5, 1.9)
        amount = (
            rng.choice((short, short, long)) if kind == "delay" else rng.choice((rng.uniform(0.05, 0.5), 0.9))
        )
    elif kind in NODE_KINDS:
        # A router's death ends its clients' requests, so it is rarer.
        target = (rng.choice([*workers, *workers, *routers]),)
        amount = rng.uniform(2, 10)
        if kind == "pause":
            lasts_s = rng.choice((rng.uniform(0.5, 3.0), rng.uniform(1.02, 1.4))) * lease_ttl_s
    else:
        target = ()
    return Fault(at=at, kind=kind, target=target, lasts_s=lasts_s, amount=amount)


def _link(kind: str, routers: tuple[str, ...], workers: list[str], rng: random.Random) -> tuple[str, ...]:
    prefills = [name for name in workers if name.startswith("prefill")]
    decodes = [name for name in workers if name.startswith("decode")]
    if kind == "frames" or rng.random() < 0.4:
        pair = [rng.choice(prefills), rng.choice(decodes)]
    else:
        pair = [rng.choice(routers), rng.choice([*workers, "client"])]
    if kind != "frames" and rng.random() < 0.5:
        pair.reverse()
    return tuple(pair)
