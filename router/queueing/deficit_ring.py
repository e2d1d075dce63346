"""The tenants of one priority class, served in turns by deficit round robin.

A synchronous core. Each turn grants a tenant a quantum of predicted ms times its weight; it is served while
what it was granted covers its items' costs. From when two tenants both wait, what they are served, divided by
their weights, never differs by more than one quantum and one largest item, however many items one of them has
(M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin", 1995). This holds while
their items fit: one that does not is not made up for by more than its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import ceil
from typing import Generic

from router.queueing.tenant_line import TenantLine
from router.queueing.waiting import T, Waiting


class DeficitRing(Generic[T]):
    """Waiting tenants in the order of their turns. quantum_ms: predicted ms per turn at weight 1."""

    def __init__(self, *, quantum_ms: float) -> None:
        self._quantum_ms = quantum_ms
        self._lines: dict[str, TenantLine[T]] = {}
        # The next turn is the first one's. While _in_turn holds, the last one is still in its turn.
        self._ring: list[TenantLine[T]] = []
        self._in_turn = False

    def __iter__(self) -> Iterator[TenantLine[T]]:
        return iter(self._ring)

    @property
    def cost_ms(self) -> float:
        """Predicted ms of all that waits here."""
        return sum(line.cost_ms for line in self._ring)

    def add(self, item: Waiting[T], bucket: int, num_buckets: int) -> None:
        """Puts an item into its tenant's line. A tenant that did not wait gets the last turn of the round."""
        line = self._lines.get(item.tenant)
        if line is None:
            line = self._lines[item.tenant] = TenantLine(item.tenant, num_buckets)
            self._ring.insert(len(self._ring) - self._in_turn, line)
        line.add(item, bucket)

    def discard(self, item: Waiting[T], bucket: int) -> None:
        """Takes out an item that is here. A tenant that does not wait any more keeps no deficit."""
        line = self._lines[item.tenant]
        line.discard(item, bucket)
        if not line:
            self._in_turn = self._in_turn and line is not self._ring[-1]
            self._ring.remove(line)
            del self._lines[item.tenant]

    def choose(self, fits: Callable[[Waiting[T]], bool]) -> Waiting[T] | None:
        """The next item that fits, paid for by its tenant but not taken out; None if no head fits.

        A tenant none of whose heads fits is passed over and keeps its deficit.
        """
        for turns, place, item in self._visits():
            if fits(item):
                self._serve(turns, place, item)
                return item
        return None

    def charge(self, item: Waiting[T]) -> None:
        """An item of this class is served out of turn. Nobody gets into debt by it."""
        line = self._lines[item.tenant]
        line.deficit_ms = max(0.0, line.deficit_ms - item.cost_ms)

    def cost_before_ms(self, deadline_at: float, tenant: str, weight: float) -> float:
        """Predicted ms served before a new item of that tenant, about.

        That is: all of the tenant's own that is due no later, and of every other tenant what its turns bring
        it meanwhile: as much by weight, and one quantum. Whose turn it is now is left out.
        """
        line = self._lines.get(tenant)
        own_ms = line.cost_before_ms(deadline_at) if line else 0.0
        share_ms = own_ms / (line.weight if line else weight) + self._quantum_ms
        others = (other for other in self._ring if other is not line)
        return own_ms + sum(min(other.cost_ms, share_ms * other.weight) for other in others)

    def _visits(self) -> Iterator[tuple[int, int, Waiting[T]]]:
        """(turns, place, item): the heads in the order in which turns would pay for them.

        turns: how many the tenant takes until its deficit covers the item; place: the tenant's in the ring.
        A dear item takes many: they are computed, not gone through.
        """
        num_asked = 0
        if self._in_turn:
            last = self._ring[-1]
            for head in takewhile(lambda head: head.cost_ms <= last.deficit_ms, last.heads):
                num_asked += 1
                yield 0, len(self._ring) - 1, head
        later = []
        for place, line in enumerate(self._ring):
            nth = num_asked if place == len(self._ring) - 1 else 0
            reach_ms = line.deficit_ms + self._quantum_ms * line.weight
            while nth < len(line.heads) and line.heads[nth].cost_ms <= reach_ms:
                yield 1, place, line.heads[nth]
                nth += 1
            if nth < len(line.heads):
                later.append((self._turns(line, nth), place, nth))
        heapify(later)
        while later:
            turns, place, nth = heappop(later)
            line = self._ring[place]
            yield turns, place, line.heads[nth]
            if nth + 1 < len(line.heads):
                heappush(later, (max(turns, self._turns(line, nth + 1)), place, nth + 1))

    def _turns(self, line: TenantLine[T], nth: int) -> int:
        """Turns until the line's deficit covers its nth head, at least one."""
        missing_ms = line.heads[nth].cost_ms - line.deficit_ms
        return max(1, ceil(missing_ms / (self._quantum_ms * line.weight)))

    def _serve(self, turns: int, place: int, item: Waiting[T]) -> None:
        """Grants everybody the turns up to this one, and charges the item to it."""
        line = self._ring[place]
        line.deficit_ms += turns * self._quantum_ms * line.weight - item.cost_ms
        for passed in self._ring[:place]:
            self._grant(passed, turns)
        for waiting in self._ring[place + 1 :]:
            self._grant(waiting, turns - 1)
        self._ring = self._ring[place + 1 :] + self._ring[: place + 1]
        self._in_turn = True

    def _grant(self, line: TenantLine[T], turns: int) -> None:
        """Grants turns without service. While its heads do not fit, a tenant saves for the dearest only."""
        if turns > 0:
            dearest_ms = max(head.cost_ms for head in line.heads)
            granted_ms = min(line.deficit_ms + turns * self._quantum_ms * line.weight, dearest_ms)
            line.deficit_ms = max(line.deficit_ms, granted_ms)
