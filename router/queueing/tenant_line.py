"""What one tenant has waiting in one priority class, by bucket, earliest deadline first.

A synchronous core. It knows nothing of other tenants.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic

from router.queueing.waiting import T, Waiting

# deadline_key, and the item it belongs to.
_Entry = tuple[float, float, int, Waiting[T]]


class TenantLine(Generic[T]):
    """One tenant's waiting items, and what it may still be served in its turn.

    Attributes:
        tenant: whose line it is.
        weight: the tenant's share, as its latest item had it.
        deficit_ms: predicted ms that may be served before the turn goes on.
        cost_ms: predicted ms of all that waits here.
    """

    def __init__(self, tenant: str, num_buckets: int) -> None:
        self.tenant = tenant
        self.weight = 1.0
        self.deficit_ms = 0.0
        self.cost_ms = 0.0
        # Sorted arrays: at the few thousand items that a queue is bounded to, moving memory costs less than a
        # heap's comparisons in Python, and any item can be taken out.
        self._buckets: list[list[_Entry[T]]] = [[] for _ in range(num_buckets)]
        self._heads: list[Waiting[T]] | None = None

    def __iter__(self) -> Iterator[Waiting[T]]:
        return (entry[3] for bucket in self._buckets for entry in bucket)

    def __bool__(self) -> bool:
        return any(self._buckets)

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    @property
    def heads(self) -> list[Waiting[T]]:
        """The first of each bucket, earliest deadline first."""
        if self._heads is None:
            self._heads = [entry[3] for entry in sorted(bucket[0] for bucket in self._buckets if bucket)]
        return self._heads

    def add(self, item: Waiting[T], bucket: int) -> None:
        """Puts an item in its place."""
        insort(self._buckets[bucket], (*item.deadline_key, item))
        self.weight = item.weight
        self.cost_ms += item.cost_ms
        self._heads = None

    def discard(self, item: Waiting[T], bucket: int) -> None:
        """Takes out an item that is here."""
        line = self._buckets[bucket]
        del line[bisect_left(line, item.deadline_key)]
        # Rounding must not be left behind.
        self.cost_ms = self.cost_ms - item.cost_ms if self else 0.0
        self._heads = None

    def set_buckets(self, num_buckets: int, bucket: Callable[[int], int]) -> None:
        """Deals what waits out anew. bucket: a bucket's index from a number of tokens."""
        items = list(self)
        self._buckets = [[] for _ in range(num_buckets)]
        for item in items:
            insort(self._buckets[bucket(item.num_tokens)], (*item.deadline_key, item))
        self._heads = None

    def cost_before_ms(self, deadline_at: float) -> float:
        """Predicted ms of what is due at deadline_at or before."""
        return sum(item.cost_ms for item in self if item.deadline_at <= deadline_at)
