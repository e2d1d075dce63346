"""Anything done to the router's queue in any order, against a list that holds the same items."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import Overloaded
from baton.v1 import common_pb2
from router.queueing.buckets import BucketQueue, Waiting

MAX_ITEMS = 12
MAX_WAIT_S = 4.0
PRIORITIES = (common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH)
TENANTS = st.sampled_from("abc")
EDGES = st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(
    lambda edges: tuple(sorted(edges))
)


class QueueMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.edges: tuple[int, ...] = (20, 40)
        self.shed: list[Waiting[int]] = []
        self.queue: BucketQueue[int] = BucketQueue(
            self.edges, max_items=MAX_ITEMS, max_wait_s=MAX_WAIT_S, quantum_ms=50.0, on_shed=self.shed.append
        )
        self.waiting: list[Waiting[int]] = []
        self.gone: list[Waiting[int]] = []
        self.numbers = itertools.count()
        self.num_popped = 0
        self.weights: dict[tuple[int, str], float] = {}
        self.now = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        num_tokens=st.integers(1, 80),
        due=st.integers(0, 3),
        cost_ms=st.sampled_from([0.0, 1.0, 30.0, 500.0]),
        tenant=TENANTS,
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        priority=st.sampled_from(PRIORITIES),
    )
    def push(
        self, *, num_tokens: int, due: int, cost_ms: float, tenant: str, weight: float, priority: int
    ) -> None:
        is_full = sum(item.is_new for item in self.waiting) >= MAX_ITEMS
        lower = [item for item in self.waiting if item.is_new and item.priority < priority]
        self.shed.clear()
        try:
            item = self.queue.push(
                next(self.numbers),
                num_tokens,
                enqueued_at=self.now,
                deadline_at=self.now + due,
                cost_ms=cost_ms,
                tenant=tenant,
                weight=weight,
                priority=priority,
            )
        except Overloaded:
            assert is_full
            assert not lower
            assert not self._greedier(tenant, weight, priority)
            return
        if is_full:
            (shed,) = self.shed
            if lower:
                assert shed == max(lower, key=lambda item: (-item.priority, item.enqueued_at, item.value))
            else:
                assert shed in self._greedier(tenant, weight, priority)
            self.waiting.remove(shed)
            self.gone.append(shed)
        self.weights[priority, tenant] = weight
        self.waiting.append(item)

    def _greedier(self, tenant: str, weight: float, priority: int) -> list[Waiting[int]]:
        """The youngest of each tenant that, with one more for `tenant`, still has more for its weight."""
        mine = [item for item in self.waiting if item.priority == priority]
        counts = Counter(item.tenant for item in mine)
        per_weight = {name: count / self.weights[priority, name] for name, count in counts.items()}
        found = {}
        for name, load in per_weight.items():
            new = [item for item in mine if item.tenant == name and item.is_new]
            if new and (counts[tenant] + 1) / weight < load:
                found[name] = max(new, key=lambda item: (item.enqueued_at, item.value))
        most = max((per_weight[name] for name in found), default=0.0)
        return [item for name, item in found.items() if per_weight[name] == most]

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        old = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        item = self.queue.push(
            old.value,
            old.num_tokens,
            enqueued_at=old.enqueued_at,
            deadline_at=old.deadline_at,
            cost_ms=old.cost_ms,
            tenant=old.tenant,
            weight=old.weight,
            priority=old.priority,
            is_new=False,
        )
        self.weights[old.priority, old.tenant] = old.weight
        self.waiting.append(item)

    @rule(largest=st.sampled_from([0, 15, 30, 100]), blocked=TENANTS)
    def pop(self, largest: int, blocked: str) -> None:
        def fits(item: Waiting[int]) -> bool:
            return item.num_tokens <= largest and item.tenant != blocked

        has_overdue = any(self.now - item.enqueued_at >= MAX_WAIT_S for item in self.waiting)
        able = [head for head in self._heads() if fits(head)]
        item = self.queue.pop(fits, self.now)
        if item is None:
            assert has_overdue or not able
            return
        assert fits(item)
        self.waiting.remove(item)
        self.gone.append(item)
        self.num_popped += 1
        if not has_overdue:
            assert item in able
            assert item.priority == max(head.priority for head in able)
            rivals = [(h.deadline_at, h.enqueued_at) for h in able if self._line(h) == self._line(item)]
            assert (item.deadline_at, item.enqueued_at) == min(rivals)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.queue.remove(item)
        assert not self.queue.remove(item)

    @rule(edges=EDGES)
    def set_edges(self, edges: tuple[int, ...]) -> None:
        if len(edges) != len(self.edges):
            self.num_popped = 0
        self.edges = edges
        self.queue.set_edges(edges)

    @rule()
    def drain(self) -> None:
        drained = self.queue.drain()
        assert sorted(drained, key=id) == sorted(self.waiting, key=id)
        assert [item.enqueued_at for item in drained] == sorted(item.enqueued_at for item in drained)
        self.waiting.clear()

    @invariant()
    def lengths_and_sums_agree(self) -> None:
        assert len(self.queue) == len(self.waiting)
        for bucket in range(len(self.edges) + 1):
            mine = [item.num_tokens for item in self.waiting if self._bucket(item) == bucket]
            assert self.queue.num_waiting(bucket) == len(mine)
            assert self.queue.num_waiting_tokens(bucket) == sum(mine)
        assert sum(self.queue.num_dispatched) == self.num_popped
        assert len(self.queue.labels) == len(self.edges) + 1

    @invariant()
    def work_agrees(self) -> None:
        higher = sum(item.cost_ms for item in self.waiting if item.priority > common_pb2.PRIORITY_LOW)
        own = sum(item.cost_ms for item in self.waiting if item.priority == common_pb2.PRIORITY_LOW)
        ahead_ms = self.queue.work_ahead_ms(float("inf"), common_pb2.PRIORITY_LOW, "a")
        assert higher - 1e-6 <= ahead_ms <= higher + own + 1e-6

    def _bucket(self, item: Waiting[int]) -> int:
        return bisect_right(self.edges, item.num_tokens)

    def _line(self, item: Waiting[int]) -> tuple[int, str]:
        return (item.priority, item.tenant)

    def _heads(self) -> list[Waiting[int]]:
        first: dict[tuple[int, str, int], Waiting[int]] = {}
        for item in sorted(self.waiting, key=lambda item: (item.deadline_at, item.enqueued_at, item.number)):
            first.setdefault((*self._line(item), self._bucket(item)), item)
        return list(first.values())


QueueMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
