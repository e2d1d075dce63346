"""The router's queue: bounded, by length bucket, tenant and priority, earliest deadline first.

A synchronous core: time comes in as an argument. What is served next:

1. What has waited max_wait_s, the oldest first, whatever the rules below say. While it does not fit,
   nothing else is served: capacity collects until it does. A tenant that was served over one quantum more
   than another one that waits cannot claim this: it waits for its own items
   (router/queueing/tenant_shares.py).
2. The highest priority of which something fits.
3. In one priority, tenants in turns of predicted prefill ms (router/queueing/deficit_ring.py).
4. Of one tenant, the earliest deadline, equal ones in order of arrival. If it does not fit, the first of
   another bucket may, so that a long prompt that waits for blocks does not keep short ones waiting.

So nothing waits longer than max_wait_s, the service under way and that of older overdue items, as long as
its tenant asks for no more than its share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from itertools import pairwise
from typing import Generic

from baton.errors import Overloaded
from baton.v1 import common_pb2
from router.learning.decaying_sum import DecayingSum
from router.queueing.deficit_ring import DeficitRing
from router.queueing.tenant_shares import TenantShares
from router.queueing.waiting import T, Waiting

__all__ = ["BucketQueue", "Waiting"]

# Highest first.
_PRIORITIES = (common_pb2.PRIORITY_HIGH, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_LOW)

# The pace of service is that of about the last ten seconds.
_PACE_HALF_LIFE_S = 5.0


class BucketQueue(Generic[T]):
    """Waiting requests by prompt length.

    edges: ascending token counts; bucket i holds edges[i-1] <= num_tokens < edges[i].
    max_items: items over all buckets that were never placed; others come on top.
    max_wait_s: after how many seconds an item is served before any other.
    quantum_ms: predicted prefill ms that a tenant of weight 1 is served per turn.
    on_shed: told of an item that has lost its place to one of higher priority, or of a tenant that has fewer
        here for its weight, when that has it; None if nobody may be shed.

    Attributes:
        labels: a name per bucket.
        num_dispatched: items popped, per bucket.
    """

    def __init__(
        self,
        edges: tuple[int, ...],
        *,
        max_items: int,
        max_wait_s: float,
        quantum_ms: float = 100.0,
        on_shed: Callable[[Waiting[T]], None] | None = None,
    ) -> None:
        self._edges = edges
        self._max_items = max_items
        self._max_wait_s = max_wait_s
        self._on_shed = on_shed
        self._num_pushed = 0
        self._num_new = 0
        self._ages: list[tuple[float, int, Waiting[T]]] = []
        self._rings = {priority: DeficitRing[T](quantum_ms=quantum_ms) for priority in _PRIORITIES}
        self._shares: TenantShares[T] = TenantShares(slack_ms=quantum_ms)
        self._served_ms = DecayingSum(_PACE_HALF_LIFE_S)
        self._num_waiting = [0] * (len(edges) + 1)
        self._num_tokens = [0] * (len(edges) + 1)
        self.num_dispatched = [0] * (len(edges) + 1)
        self.labels = _labels(edges)

    def __len__(self) -> int:
        return len(self._ages)

    def bucket(self, num_tokens: int) -> int:
        """Index of the bucket for a prompt of that length."""
        return bisect_right(self._edges, num_tokens)

    def push(
        self,
        value: T,
        num_tokens: int,
        *,
        enqueued_at: float,
        deadline_at: float,
        cost_ms: float,
        tenant: str = "",
        weight: float = 1.0,
        priority: int = common_pb2.PRIORITY_NORMAL,
        is_new: bool = True,
    ) -> Waiting[T]:
        """Adds an item. The arguments are those of Waiting.

        weight: the tenant's, above 0; the latest one holds for all its items.
        priority: any other than low or high is normal.
        is_new: whether the bound applies. A request that was admitted before and comes back is never refused
            and never shed; with its old times it has its old place.
        Raises Overloaded when the queue is full and nobody may be shed for it.
        """
        assert 0 <= cost_ms < float("inf")
        assert weight > 0
        self._num_pushed += 1
        item = Waiting(
            value=value,
            num_tokens=num_tokens,
            enqueued_at=enqueued_at,
            deadline_at=deadline_at,
            cost_ms=cost_ms,
            tenant=tenant,
            weight=weight,
            priority=_level(priority),
            is_new=is_new,
            number=self._num_pushed,
        )
        shed = self._make_room(item)
        self._add(item)
        if shed is not None and self._on_shed is not None:
            self._on_shed(shed)
        return item

    def pop(self, fits: Callable[[Waiting[T]], bool], now: float) -> Waiting[T] | None:
        """The next item that fits, or None.

        fits: whether there is capacity for the item, which it may take: an item that fits is popped. Asked
            about heads of buckets only, in the order in which they would be served. It may also say yes to an
            item that need not wait any longer: that is popped, and counted, like one that is served. It must
            not change the queue. While nothing fits it is asked about every head, so let it say no quickly.
        """
        item = self._overdue(now)
        if item is not None:
            if not fits(item):
                return None
            self._rings[item.priority].charge(item)
        else:
            choices = (ring.choose(fits) for ring in self._rings.values())
            item = next((choice for choice in choices if choice is not None), None)
        if item is not None:
            self._shares.charge(item)
            self._served_ms.add(item.cost_ms, now)
            self.num_dispatched[self.bucket(item.num_tokens)] += 1
            self._discard(item)
        return item

    def remove(self, item: Waiting[T]) -> bool:
        """Takes an item out; False if it is no longer here."""
        place = bisect_left(self._ages, item.age_key)
        if place == len(self._ages) or self._ages[place][2] is not item:
            return False
        self._discard(item)
        return True

    def drain(self) -> list[Waiting[T]]:
        """Takes everything out, the oldest first."""
        items = [entry[2] for entry in self._ages]
        for item in items:
            self._discard(item)
        return items

    def set_edges(self, edges: tuple[int, ...]) -> None:
        """Deals what waits out to other buckets.

        num_dispatched stays, by index, unless the number of buckets changes: then it starts at 0.
        """
        num_buckets = len(edges) + 1
        if num_buckets != len(self.num_dispatched):
            self.num_dispatched = [0] * num_buckets
        self._edges = edges
        self.labels = _labels(edges)
        self._num_waiting = [0] * num_buckets
        self._num_tokens = [0] * num_buckets
        self._num_new = 0
        for _, _, item in self._ages:
            self._count(item, 1)
        for ring in self._rings.values():
            for line in ring:
                line.set_buckets(num_buckets, self.bucket)

    def num_waiting(self, bucket: int) -> int:
        """Items in one bucket."""
        return self._num_waiting[bucket]

    def num_waiting_tokens(self, bucket: int) -> int:
        """Prompt tokens to compute in one bucket."""
        return self._num_tokens[bucket]

    def waiting_ms(self) -> list[float]:
        """Predicted prefill ms of what waits, by bucket. Takes O(items); any thread may ask."""
        waiting = [0.0] * len(self._num_waiting)
        for _, _, item in tuple(self._ages):
            waiting[min(self.bucket(item.num_tokens), len(waiting) - 1)] += item.cost_ms
        return waiting

    def work_ahead_ms(self, deadline_at: float, priority: int, tenant: str, *, weight: float = 1.0) -> float:
        """Predicted prefill ms that would be served before a new item, on all workers together.

        That is: all of higher priority, and of its own what DeficitRing.cost_before_ms counts. Left out are
        what comes later, what is overdue or becomes so, and that what does not fit may be passed over.
        weight: the tenant's, if it does not wait yet. Takes O(items of the tenant + tenants).
        """
        level = _level(priority)
        higher = _PRIORITIES[: _PRIORITIES.index(level)]
        own_ms = self._rings[level].cost_before_ms(deadline_at, tenant, weight)
        return own_ms + sum(self._rings[other].cost_ms for other in higher)

    def _overdue(self, now: float) -> Waiting[T] | None:
        """The item that must be served next because it has waited max_wait_s."""
        if not self._ages or now - self._ages[0][0] < self._max_wait_s:
            return None
        item = self._shares.oldest()
        return item if item is not None and now - item.enqueued_at >= self._max_wait_s else None

    def _make_room(self, newcomer: Waiting[T]) -> Waiting[T] | None:
        """Takes out what the newcomer displaces, if anything. Raises Overloaded when there is no room."""
        if not newcomer.is_new or self._num_new < self._max_items:
            return None
        may_shed = self._on_shed is not None
        shed = (self._least(newcomer.priority) or self._of_greediest(newcomer)) if may_shed else None
        if shed is None:
            raise Overloaded(
                f"{self._max_items} requests are waiting already; try again later",
                retry_after_s=self._retry_hint(newcomer.enqueued_at),
            )
        self._discard(shed)
        return shed

    def _least(self, priority: int) -> Waiting[T] | None:
        """The youngest of the lowest priority below that one which was never placed."""
        for level in reversed(_PRIORITIES):
            if level == priority:
                return None
            items = (item for line in self._rings[level] for item in line if item.is_new)
            youngest = max(items, key=lambda item: item.age_key, default=None)
            if youngest is not None:
                return youngest
        return None

    def _of_greediest(self, newcomer: Waiting[T]) -> Waiting[T] | None:
        """Of the tenant that waits with most requests for its weight, the youngest that was never placed."""
        lines = {line.tenant: line for line in self._rings[newcomer.priority]}
        mine = len(lines[newcomer.tenant]) if newcomer.tenant in lines else 0
        for line in sorted(lines.values(), key=lambda line: -len(line) / line.weight):
            if (mine + 1) / newcomer.weight >= len(line) / line.weight:
                return None
            youngest = max(
                (item for item in line if item.is_new), key=lambda item: item.age_key, default=None
            )
            if youngest is not None:
                return youngest
        return None

    def _retry_hint(self, now: float) -> float:
        """When there is likely room again, within limits that suit a client.

        What waits takes so long at the pace of late; before anything was served, as long as the oldest waits.
        """
        pace = self._served_ms.per_second(now)
        waiting_ms = sum(ring.cost_ms for ring in self._rings.values())
        oldest = self._ages[0][0] if self._ages else now
        return min(max(waiting_ms / pace if pace else now - oldest, 0.1), 10.0)

    def _add(self, item: Waiting[T]) -> None:
        insort(self._ages, (*item.age_key, item))
        self._shares.add(item)
        self._rings[item.priority].add(item, self.bucket(item.num_tokens), len(self._num_waiting))
        self._count(item, 1)

    def _discard(self, item: Waiting[T]) -> None:
        del self._ages[bisect_left(self._ages, item.age_key)]
        self._shares.discard(item)
        self._rings[item.priority].discard(item, self.bucket(item.num_tokens))
        self._count(item, -1)

    def _count(self, item: Waiting[T], by: int) -> None:
        bucket = self.bucket(item.num_tokens)
        self._num_new += by * item.is_new
        self._num_waiting[bucket] += by
        self._num_tokens[bucket] += by * item.num_tokens


def _level(priority: int) -> common_pb2.Priority.ValueType:
    return next((level for level in _PRIORITIES if level == priority), common_pb2.PRIORITY_NORMAL)


def _labels(edges: tuple[int, ...]) -> list[str]:
    if not edges:
        return ["any"]
    middle = [f"{low}-{high - 1}" for low, high in pairwise(edges)]
    return [f"<{edges[0]}", *middle, f">={edges[-1]}"]
