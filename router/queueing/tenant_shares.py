"""Whether a tenant has had more than its share, over all priority classes, and its items by age.

A synchronous core. It decides who may claim the bound on waiting: a tenant that queues more than its share
of the workers can serve waits for its own items, and must not make others wait for them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic

from router.queueing.waiting import T, Waiting


class _Share(Generic[T]):
    """One waiting tenant: its items by age, and the ms it was served, divided by its weight."""

    __slots__ = ("ages", "served_ms", "weight")

    def __init__(self, served_ms: float) -> None:
        self.ages: list[tuple[float, int, Waiting[T]]] = []
        self.served_ms = served_ms
        self.weight = 1.0


class TenantShares(Generic[T]):
    """The waiting tenants.

    slack_ms: ms, per weight, by which one may be ahead of the one that was served least.
    """

    def __init__(self, *, slack_ms: float) -> None:
        self._slack_ms = slack_ms
        self._shares: dict[str, _Share[T]] = {}

    def add(self, item: Waiting[T]) -> None:
        """An item waits. A tenant that did not wait starts level with the one that was served least."""
        share = self._shares.get(item.tenant)
        if share is None:
            share = self._shares[item.tenant] = _Share(self._least_ms())
        insort(share.ages, (*item.age_key, item))
        share.weight = item.weight

    def discard(self, item: Waiting[T]) -> None:
        """An item that is here waits no longer."""
        share = self._shares[item.tenant]
        del share.ages[bisect_left(share.ages, item.age_key)]
        if not share.ages:
            del self._shares[item.tenant]

    def charge(self, item: Waiting[T]) -> None:
        """An item that is here is served."""
        share = self._shares[item.tenant]
        share.served_ms += item.cost_ms / share.weight

    def oldest(self) -> Waiting[T] | None:
        """The oldest item of the tenants that have not had more than their share; None if nothing waits."""
        limit_ms = self._least_ms() + self._slack_ms
        fair = (share.ages[0] for share in self._shares.values() if share.served_ms <= limit_ms)
        first = min(fair, default=None)
        return None if first is None else first[2]

    def _least_ms(self) -> float:
        return min((share.served_ms for share in self._shares.values()), default=0.0)
