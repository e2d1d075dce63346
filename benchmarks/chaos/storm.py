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
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.load import Load, Record
from benchmarks.chaos.rig import CLIENT, Rig
from benchmarks.chaos.sight import Edge

WHOLE_WITHIN_S = 90.0
# How long a fault looks for something busy before that is worth a complaint.
BUSY_WITHIN_S = 40.0
_LOOK_S = 0.02
_GLANCE_S = 0.2
_JITTER = 0.3
# A hand with no more faults of the last deck than these gets another.
_FEW = 3
# In the time of so many decks each fault of the first has had its turn.
_DECKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault as it went, on the loop's clock.

    edge: what it struck.  lifted_at: it was over.  whole_at: what it struck was of use again.
    answers_at: answers had come since.
    detected_s: from its beginning until somebody knew; None if nobody did before that was whole.
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

    def was_at(self, record: Record) -> bool:
        """Whether the question is known to have been at what was struck; of a link, at both its ends."""
        return set(self.edge) - {CLIENT} <= record.places


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A deck and its pace: one fault about every so many seconds. name: for complaints."""

    name: str
    deck: Deck
    every_s: float

    def is_long(self, seconds: float, num_kinds: int) -> bool:
        """Whether so many seconds are enough for every kind of fault to have had its turn."""
        return seconds >= _DECKS * num_kinds * self.every_s


@dataclass
class Storm:
    """Brings the faults down on a cluster under load.

    complaints: lanes that struck nobody; kinds that were never struck though they looked for somebody for
    BUSY_WITHIN_S, or though the run was long enough for all kinds.
    """

    rig: Rig
    load: Load
    strikes: list[Strike] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    _held: Counter[Edge] = field(default_factory=Counter)
    _broken: Counter[Edge] = field(default_factory=Counter)

    async def run(self, lanes: list[Lane], seconds: float, seed: int) -> None:
        """Deals for so many seconds; returns once all that was struck is of use again."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        hands = [
            _Hand(lane.deck, random.Random(seed * len(lanes) + index), clock())
            for index, lane in enumerate(lanes)
        ]
        async with asyncio.TaskGroup() as group:
            for lane, hand in zip(lanes, hands, strict=True):
                group.create_task(self._deal_on(lane, hand, until, group), name=f"lane {lane.name}")
        struck = {strike.kind for strike in self.strikes}
        for lane, hand in zip(lanes, hands, strict=True):
            if not hand.num_dealt:
                self.complaints.append(f"{lane.name}: not one fault was dealt")
            overdue = hand.first_kinds if lane.is_long(seconds, len(hand.first_kinds)) else set()
            never = (overdue | hand.never_busy(clock())) - struck
            self.complaints += [f"{kind}: it never struck" for kind in sorted(never)]

    async def _deal_on(self, lane: Lane, hand: _Hand, until: float, group: asyncio.TaskGroup) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            hand.fill(clock())
            next_at = clock() + lane.every_s * hand.rng.uniform(1 - _JITTER, 1 + _JITTER)
            while clock() < next_at:
                hand.look(self.rig)
                await asyncio.sleep(min(_GLANCE_S, max(0.0, next_at - clock())))
            while (choice := self._choose(hand)) is None and clock() <= until:
                await asyncio.sleep(_LOOK_S)
            if choice is None or clock() > until:
                return
            card, edge = choice
            hand.deal(card)
            self._hold(card.fault, edge, 1)
            group.create_task(self._strike(card.fault, edge), name=card.fault.kind)

    def _choose(self, hand: _Hand) -> tuple[_Card, Edge] | None:
        """The first of the hand that strikes something and leaves a way."""
        for card in hand.cards:
            edge = card.fault.aim(self.rig)
            if edge is None:
                continue
            card.was_aimed = True
            would_be_broken = +self._broken + Counter({edge: int(card.fault.is_breaking)})
            if not self._held[edge] and leave_a_way((+would_be_broken).keys()):
                return card, edge
        return None

    def _hold(self, fault: Fault, edge: Edge, count: int) -> None:
        self._held[edge] += count
        if fault.is_breaking:
            self._broken[edge] += count

    async def _strike(self, fault: Fault, edge: Edge) -> None:
        clock = asyncio.get_running_loop().time
        begun_at = clock()
        print(f"{begun_at:.2f} {fault.kind}: {_words(edge)}", flush=True)
        try:
            async with asyncio.timeout(WHOLE_WITHIN_S):
                await fault.strike(self.rig, edge)
            lifted_at = clock()
            await fault.recover(self.rig, edge, WHOLE_WITHIN_S)
            whole_at = clock()
            self._hold(fault, edge, -1)
            await self.load.progress()
        except TimeoutError:
            message = f"{fault.kind} of {_words(edge)}: not whole within {WHOLE_WITHIN_S:g} s, or no answers"
            raise TimeoutError(message) from None
        noticed_at = fault.noticed_at(self.rig, self.load, edge, begun_at)
        if noticed_at is not None and noticed_at > whole_at:
            # That may be the next fault of the same victim.
            noticed_at = None
        self.strikes.append(
            Strike(
                kind=fault.kind,
                edge=edge,
                begun_at=begun_at,
                lifted_at=lifted_at,
                whole_at=whole_at,
                answers_at=clock(),
                detected_s=None if noticed_at is None else noticed_at - begun_at,
            )
        )


@dataclass(eq=False)
class _Card:
    """A fault in the hand. was_aimed: it had something busy before it at some time."""

    fault: Fault
    dealt_at: float
    was_aimed: bool = False


class _Hand:
    """What one lane may deal next, the oldest first. first_kinds: of the whole first deck."""

    def __init__(self, deck: Deck, rng: random.Random, now: float) -> None:
        self.rng = rng
        self.cards: list[_Card] = []
        self.num_dealt = 0
        self._deck = deck
        self._filled_at = now
        self.fill(now)
        self.first_kinds = {card.fault.kind for card in self.cards}

    def fill(self, now: float) -> None:
        """Takes another deck when few of the last are left, less the kinds that still wait for their victim.

        Those may wait long, and others shall not.
        """
        if sum(card.dealt_at == self._filled_at for card in self.cards) <= _FEW:
            waiting = {card.fault.kind for card in self.cards}
            new = [fault for fault in self._deck(self.rng) if fault.kind not in waiting]
            self.cards += [_Card(fault, now) for fault in new]
            self._filled_at = now

    def deal(self, card: _Card) -> None:
        """It strikes."""
        self.cards.remove(card)
        self.num_dealt += 1

    def look(self, rig: Rig) -> None:
        """Notes who has something busy before them, whether or not it is their turn."""
        for card in self.cards:
            card.was_aimed |= card.fault.aim(rig) is not None

    def never_busy(self, now: float) -> set[str]:
        """Kinds of the faults that have found nothing to strike for BUSY_WITHIN_S."""
        old = [card for card in self.cards if now - card.dealt_at > BUSY_WITHIN_S]
        return {card.fault.kind for card in old if not card.was_aimed}


def _words(edge: Edge) -> str:
    return edge[0] if edge[0] == edge[1] else "->".join(edge)
