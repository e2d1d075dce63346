"""The course of the faults: when each strikes, and how it went.

Two lanes deal from a deck each: the lesser faults every few seconds, those that end a process more seldom.
Faults overlap. One waits for its turn while it would close the last way through the cluster, or while another
has its victim; what a fault broke counts as broken until it is of use again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.chaos.decks import Deck, leave_a_way
from benchmarks.chaos.faults import Edge, Fault
from benchmarks.chaos.load import Load, Record
from benchmarks.chaos.rig import Rig

WHOLE_WITHIN_S = 90.0
# How long a fault looks for something busy before that is worth a complaint.
BUSY_WITHIN_S = 40.0
_LOOK_S = 0.02
_GLANCE_S = 0.2
_JITTER = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault as it went, on the loop's clock.

    edge: what it struck.  lifted_at: it was over.  whole_at: what it struck was of use again.
    answers_at: answers had come since.
    detected_s: from its begin until somebody knew; None if nobody ever did, as of a short stop.
    """

    kind: str
    edge: Edge
    begun_at: float
    lifted_at: float
    whole_at: float
    answers_at: float
    detected_s: float | None = None

    def had(self, record: Record) -> bool:
        """Whether the question was under way during the fault, or before answers came again."""
        return record.asked_at <= self.answers_at and record.ended_at >= self.begun_at

    def recovery_s(self, record: Record) -> float | None:
        """The longest gap between tokens of an answer under way at what was struck, while it was.

        None if the answer was not there, or had no token yet, or had its last one already.
        """
        if not record.places & set(self.edge) or not record.was_resumed:
            return None
        pairs = zip(record.arrivals, record.arrivals[1:], strict=False)
        gaps = [b - a for a, b in pairs if a <= self.lifted_at and b >= self.begun_at]
        return max(gaps, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A deck and its pace: one fault about every so many seconds."""

    deck: Deck
    every_s: float


@dataclass
class Storm:
    """Brings the faults down on a cluster under load.

    never_busy: kinds of faults that found nothing to strike for BUSY_WITHIN_S and were never struck.
    """

    rig: Rig
    load: Load
    strikes: list[Strike] = field(default_factory=list)
    never_busy: list[str] = field(default_factory=list)
    _held: Counter[Edge] = field(default_factory=Counter)
    _broken: Counter[Edge] = field(default_factory=Counter)

    async def run(self, lanes: list[Lane], seconds: float, seed: int) -> None:
        """Deals for so many seconds; returns once all that was struck is of use again."""
        until = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for index, lane in enumerate(lanes):
                rng = random.Random(seed * len(lanes) + index)
                group.create_task(self._deal_on(lane, rng, until, group), name=f"lane {index}")
        struck = {strike.kind for strike in self.strikes}
        self.never_busy = sorted(set(self.never_busy) - struck)

    async def _deal_on(self, lane: Lane, rng: random.Random, until: float, group: asyncio.TaskGroup) -> None:
        clock = asyncio.get_running_loop().time
        hand = _Hand(lane.deck(rng), clock())
        while True:
            if not hand.faults:
                hand = _Hand(lane.deck(rng), clock())
            next_at = clock() + lane.every_s * rng.uniform(1 - _JITTER, 1 + _JITTER)
            while clock() < next_at:
                hand.look(self.rig)
                await asyncio.sleep(min(_GLANCE_S, max(0.0, next_at - clock())))
            while (choice := self._choose(hand)) is None:
                if clock() > until:
                    break
                await asyncio.sleep(_LOOK_S)
            if choice is None or clock() > until:
                break
            fault, edge = choice
            hand.faults.remove(fault)
            self._hold(fault, edge, 1)
            group.create_task(self._strike(fault, edge), name=fault.kind)
        if clock() - hand.dealt_at > BUSY_WITHIN_S:
            self.never_busy += [fault.kind for fault in hand.faults if id(fault) not in hand.aimed]

    def _choose(self, hand: _Hand) -> tuple[Fault, Edge] | None:
        """The first of the hand that strikes something and leaves a way."""
        for fault in hand.faults:
            edge = fault.aim(self.rig)
            if edge is None:
                continue
            hand.aimed.add(id(fault))
            would_be_broken = +self._broken + Counter({edge: int(fault.is_breaking)})
            if not self._held[edge] and leave_a_way((+would_be_broken).keys()):
                return fault, edge
        return None

    def _hold(self, fault: Fault, edge: Edge, count: int) -> None:
        self._held[edge] += count
        if fault.is_breaking:
            self._broken[edge] += count

    async def _strike(self, fault: Fault, edge: Edge) -> None:
        clock = asyncio.get_running_loop().time
        begun_at = clock()
        print(f"{begun_at:.2f} {fault.kind}: {_words(edge)}", flush=True)
        detection = asyncio.create_task(self._detect(fault, edge, begun_at), name=f"detect {fault.kind}")
        try:
            await fault.strike(self.rig, edge)
            lifted_at = clock()
            await fault.recover(self.rig, edge, WHOLE_WITHIN_S)
            whole_at = clock()
            self._hold(fault, edge, -1)
            await self.load.progress()
        except TimeoutError:
            message = f"{fault.kind} of {_words(edge)}: not whole within {WHOLE_WITHIN_S:g} s, or no answers"
            raise TimeoutError(message) from None
        finally:
            detection.cancel()
            await asyncio.wait([detection])
        self.strikes.append(
            Strike(
                kind=fault.kind,
                edge=edge,
                begun_at=begun_at,
                lifted_at=lifted_at,
                whole_at=whole_at,
                answers_at=clock(),
                detected_s=None if detection.cancelled() else detection.result() - begun_at,
            )
        )

    async def _detect(self, fault: Fault, edge: Edge, since: float) -> float:
        """When somebody knew."""
        while not fault.is_noticed(self.rig, self.load, edge, since):
            await asyncio.sleep(_LOOK_S)
        return asyncio.get_running_loop().time()


@dataclass
class _Hand:
    """What is left of a deck. aimed: faults that had something busy before them at some time."""

    faults: list[Fault]
    dealt_at: float
    aimed: set[int] = field(default_factory=set)

    def look(self, rig: Rig) -> None:
        """Notes who has something busy before them, whether or not it is their turn."""
        self.aimed |= {id(fault) for fault in self.faults if fault.aim(rig) is not None}


def _words(edge: Edge) -> str:
    return edge[0] if edge[0] == edge[1] else "->".join(edge)
