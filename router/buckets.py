"""The router's queue: one line per length bucket, bounded over all of them.

A synchronous core: time comes in as an argument. Order: the shortest bucket
first, first come first served inside a bucket, so that a short prompt never
waits behind a long one. So that long prompts do not wait for ever either, an
item that has waited max_skip_s is served before anything younger, and while it
does not fit, nothing younger is: capacity collects until it does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from baton.errors import Overloaded

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[T]):
    """One waiting item: num_tokens of prompt to compute, queued at enqueued_at (seconds)."""

    value: T
    num_tokens: int
    enqueued_at: float


class BucketQueue(Generic[T]):
    """Waiting requests by prompt length.

    edges: ascending token counts; bucket i holds edges[i-1] <= num_tokens < edges[i].
    max_items: items over all buckets.
    max_skip_s: how long an item may be overtaken, in seconds.
    """

    def __init__(self, edges: tuple[int, ...], *, max_items: int, max_skip_s: float) -> None:
        self._edges = edges
        self._max_items = max_items
        self._max_skip_s = max_skip_s
        self._lines: list[deque[Waiting[T]]] = [deque() for _ in range(len(edges) + 1)]
        self.num_dispatched = [0] * (len(edges) + 1)
        self.labels = _labels(edges)

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def bucket(self, num_tokens: int) -> int:
        """Index of the bucket for a prompt of that length."""
        return bisect_right(self._edges, num_tokens)

    def push(self, value: T, num_tokens: int, enqueued_at: float, *, is_new: bool = True) -> Waiting[T]:
        """Adds an item to its bucket's line, in order of enqueued_at.

        is_new: whether the bound applies. A request that was admitted before and
            comes back is never refused.
        Raises Overloaded when the queue is full.
        """
        if is_new and len(self) >= self._max_items:
            raise Overloaded(
                f"{self._max_items} requests are waiting already; try again later",
                retry_after_s=self._retry_hint(enqueued_at),
            )
        item = Waiting(value=value, num_tokens=num_tokens, enqueued_at=enqueued_at)
        line = self._lines[self.bucket(num_tokens)]
        place = len(line)
        while place and line[place - 1].enqueued_at > enqueued_at:
            place -= 1
        line.insert(place, item)
        return item

    def drain(self) -> list[Waiting[T]]:
        """Takes everything out."""
        items = [item for line in self._lines for item in line]
        for line in self._lines:
            line.clear()
        return items

    def remove(self, item: Waiting[T]) -> bool:
        """Takes an item out; False if it is no longer here."""
        line = self._lines[self.bucket(item.num_tokens)]
        if item not in line:
            return False
        line.remove(item)
        return True

    def pop(self, fits: Callable[[Waiting[T]], bool], now: float) -> Waiting[T] | None:
        """The next item that fits, or None.

        fits: whether there is capacity for the item, which it may take: an item that fits is popped. Asked
            about heads of lines only.
        """
        heads = [line[0] for line in self._lines if line]
        overdue = [head for head in heads if now - head.enqueued_at >= self._max_skip_s]
        if overdue:
            heads = [min(overdue, key=lambda head: head.enqueued_at)]
        for head in heads:
            if fits(head):
                bucket = self.bucket(head.num_tokens)
                self._lines[bucket].popleft()
                self.num_dispatched[bucket] += 1
                return head
        return None

    def num_waiting(self, bucket: int) -> int:
        """Items in one bucket."""
        return len(self._lines[bucket])

    def num_waiting_tokens(self, bucket: int) -> int:
        """Prompt tokens in one bucket."""
        return sum(item.num_tokens for item in self._lines[bucket])

    def _retry_hint(self, now: float) -> float:
        # The oldest head has waited for the queue to move; that is the best guess of
        # how long it takes to move again, within limits that suit a client.
        oldest = min((line[0].enqueued_at for line in self._lines if line), default=now)
        return min(max(now - oldest, 0.1), 10.0)


def _labels(edges: tuple[int, ...]) -> list[str]:
    middle = [f"{low}-{high - 1}" for low, high in pairwise(edges)]
    return [f"<{edges[0]}", *middle, f">={edges[-1]}"]
