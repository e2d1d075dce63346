"""How long anything waits in the router's queue, with simulated workers in simulated time."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from baton.v1 import common_pb2
from router.queueing.buckets import BucketQueue, Waiting

EDGES = (128, 256, 512)
LOW, NORMAL, HIGH = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH
MAX_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Request:
    at: float
    name: str = "flood"
    num_tokens: int = 100
    cost_ms: float = 20.0
    ttft_s: float = 0.2
    tenant: str = ""
    priority: int = NORMAL
    num_blocks: int = 0


class Server:
    """Serves what the queue gives it while it has blocks; an item holds one worker for its cost.

    num_workers: items served at a time. Keeps when each request began, and how long it waited.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        num_blocks: int = 0,
        max_wait_s: float = MAX_WAIT_S,
        quantum_ms: float = 100.0,
    ) -> None:
        self.queue: BucketQueue[Request] = BucketQueue(
            EDGES, max_items=100_000, max_wait_s=max_wait_s, quantum_ms=quantum_ms
        )
        self.waits: list[tuple[Request, float]] = []
        self._num_workers = num_workers
        self._num_blocks = num_blocks
        self._running: list[tuple[float, int, int]] = []
        self.now = 0.0

    def run(self, requests: Iterable[Request], until: float = math.inf) -> None:
        arrivals = sorted(requests, key=lambda request: request.at)
        index = 0
        while True:
            next_arrival = arrivals[index].at if index < len(arrivals) else math.inf
            next_end = self._running[0][0] if self._running else math.inf
            if min(next_arrival, next_end) > until or next_arrival == next_end == math.inf:
                return
            self.now = min(next_arrival, next_end)
            while self._running and self._running[0][0] <= self.now:
                heapq.heappop(self._running)
            while index < len(arrivals) and arrivals[index].at <= self.now:
                self._arrive(arrivals[index])
                index += 1
            while (item := self.queue.pop(self._fits, self.now)) is not None:
                self._start(item.value)

    def waits_of(self, name: str) -> list[float]:
        return [wait for request, wait in self.waits if request.name == name]

    def _arrive(self, request: Request) -> None:
        self.queue.push(
            request,
            request.num_tokens,
            enqueued_at=request.at,
            deadline_at=request.at + request.ttft_s,
            cost_ms=request.cost_ms,
            tenant=request.tenant,
            priority=request.priority,
        )

    def _fits(self, item: Waiting[Request]) -> bool:
        used = sum(num_blocks for _, _, num_blocks in self._running)
        has_blocks = used + item.value.num_blocks <= self._num_blocks
        return len(self._running) < self._num_workers and (has_blocks or not self._num_blocks)

    def _start(self, request: Request) -> None:
        self.waits.append((request, self.now - request.at))
        end = self.now + request.cost_ms / 1000
        heapq.heappush(self._running, (end, len(self.waits), request.num_blocks))


def every(interval_s: float, until: float, **fields: object) -> list[Request]:
    return [Request(at=n * interval_s, **fields) for n in range(round(until / interval_s))]  # type: ignore[arg-type]


# Each flood alone keeps the worker busy all the time, and by rule is served before its victim. Times of
# 1/64 s are added without rounding: the worker is never idle by chance.
TICK_S = 1 / 64
FLOODS = {
    "short": (
        every(TICK_S, 60.0, cost_ms=1000 * TICK_S),
        {"num_tokens": 60_000, "cost_ms": 1000.0, "ttft_s": 60.0},
    ),
    "long": (
        every(1.000, 60.0, num_tokens=60_000, cost_ms=1000.0, ttft_s=1.0),
        {"ttft_s": 1e6},
    ),
    "high priority": (
        every(TICK_S, 60.0, cost_ms=1000 * TICK_S, priority=HIGH),
        {"priority": LOW},
    ),
    "high priority of another tenant": (
        every(TICK_S, 60.0, cost_ms=1000 * TICK_S, priority=HIGH, tenant="a"),
        {"priority": LOW, "tenant": "b"},
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_nothing_waits_beyond_the_bound_and_one_service_under_a_flood(flood: str) -> None:
    requests, victim = FLOODS[flood]
    victims = [Request(at=at, name="victim", **victim) for at in (1.01, 20.01)]  # type: ignore[arg-type]
    server = Server(num_workers=1)
    server.run([*requests, *victims])
    one_service_s = max(request.cost_ms for request in [*requests, *victims]) / 1000
    assert max(wait for _, wait in server.waits) <= MAX_WAIT_S + one_service_s
    # The flood was one: without the bound they would have waited to its end.
    assert min(server.waits_of("victim")) >= MAX_WAIT_S
    assert len(server.waits) == len(requests) + 2


def test_without_the_bound_the_victim_waits_for_the_end_of_the_flood() -> None:
    requests, victim = FLOODS["short"]
    server = Server(num_workers=1, max_wait_s=1e9)
    server.run([*requests, Request(at=1.01, name="victim", **victim)])  # type: ignore[arg-type]
    assert server.waits_of("victim")[0] > 55.0


def test_a_short_prompt_behind_long_ones_waits_for_one_of_their_services_at_most() -> None:
    longs = [Request(at=0.0, name="long", num_tokens=60_000, cost_ms=1000.0, ttft_s=60.0) for _ in range(20)]
    shorts = [Request(at=at, name="short", num_tokens=101) for at in (0.5, 1.7, 3.3, 8.9)]
    # The long ones have waited for longer than the bound only when the short ones are through.
    server = Server(num_workers=1, max_wait_s=60.0)
    server.run([*longs, *shorts])
    assert max(server.waits_of("short")) <= 1.0
    assert len(server.waits) == 24


def test_small_requests_run_while_a_large_one_waits_for_blocks_and_it_starts_within_the_bound() -> None:
    """10 of 40 blocks are free; a request of 30, then 20 of one block, then one-block ones at full rate."""
    hold_ms = 1000.0
    server = Server(num_workers=1000, num_blocks=40)
    # They end one after another, so that 30 blocks are never free by themselves.
    running = [Request(at=0.0, name="running", num_blocks=1, cost_ms=2000.0 + 50 * n) for n in range(30)]
    large = [Request(at=0.1, name="large", num_tokens=600, num_blocks=30, cost_ms=hold_ms, ttft_s=0.1)]
    first = [Request(at=0.2, name="small", num_blocks=1, cost_ms=hold_ms) for _ in range(20)]
    flood = every(1 / 32, 60.0, num_blocks=1, cost_ms=hold_ms)
    server.run([*running, *large, *first, *(request for request in flood if request.at > 0.2)])
    # Ten at once, ten when those end, a second later.
    assert sorted(server.waits_of("small")) == pytest.approx([0.0] * 10 + [1.0] * 10)
    # At the bound nothing more is admitted; what runs ends within its second.
    assert MAX_WAIT_S <= server.waits_of("large")[0] <= MAX_WAIT_S + hold_ms / 1000
    assert max(wait for _, wait in server.waits) <= MAX_WAIT_S + hold_ms / 1000


def test_equal_requests_start_in_order_though_one_was_asked_in_vain() -> None:
    queue: BucketQueue[int] = BucketQueue(EDGES, max_items=10, max_wait_s=MAX_WAIT_S)
    for number in range(4):
        queue.push(number, 10, enqueued_at=0.0, deadline_at=1.0, cost_ms=10.0)
    room = iter([True, False, True, True, True])
    popped = [queue.pop(lambda _: next(room), 0.0) for _ in range(5)]
    assert [item and item.value for item in popped] == [0, None, 1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_a_modest_tenants_wait_is_bounded_though_a_greedy_one_sends_twice_what_can_be_served(
    seed: int,
) -> None:
    rng = random.Random(seed)
    greedy = [
        Request(at=at, name="greedy", tenant="greedy", cost_ms=rng.uniform(10, 70))
        for at in sorted(rng.uniform(0, 40) for _ in range(2000))
    ]
    modest = [
        Request(at=at, name="modest", tenant="modest", cost_ms=rng.uniform(10, 70), ttft_s=30.0)
        for at in range(1, 21)
    ]
    server = Server(num_workers=1)
    server.run([*greedy, *modest], until=40.0)
    # The service under way; the rest of the greedy tenant's turn, and its claims on the bound up to one
    # quantum more than the modest one, each with the item that goes over it.
    assert len(server.waits_of("modest")) == 20
    assert max(server.waits_of("modest")) <= 0.070 + 2 * (0.100 + 0.070)
    # It is really flooded: its own items wait for longer than the bound.
    assert max(server.waits_of("greedy")) > 2 * MAX_WAIT_S


@pytest.mark.parametrize("seed", range(3))
def test_two_backlogged_tenants_share_though_all_they_queue_is_overdue(seed: int) -> None:
    rng = random.Random(seed)
    quantum_ms, largest_ms = 100.0, 70.0
    queue: BucketQueue[str] = BucketQueue(
        EDGES, max_items=10_000, max_wait_s=MAX_WAIT_S, quantum_ms=quantum_ms
    )
    for tenant, num_items in (("greedy", 4000), ("modest", 40)):
        for number in range(num_items):
            queue.push(
                tenant,
                rng.choice([50, 5000]),
                # The greedy tenant was here before.
                enqueued_at=number / 1000 + (10.0 if tenant == "modest" else 0.0),
                deadline_at=rng.uniform(0, 30),
                cost_ms=rng.uniform(1, largest_ms),
                tenant=tenant,
                priority=rng.choice([LOW, NORMAL, HIGH]) if tenant == "modest" else NORMAL,
            )
    served = {"greedy": 0.0, "modest": 0.0}
    counts = {"greedy": 0, "modest": 0}
    while counts["modest"] < 40:
        item = queue.pop(lambda _: True, 100.0)
        assert item is not None
        served[item.value] += item.cost_ms
        counts[item.value] += 1
        # A quantum that may be claimed ahead and one of turns, each with the item that goes over it.
        assert abs(served["greedy"] - served["modest"]) <= 2 * (quantum_ms + largest_ms)


def test_a_tenant_alone_is_never_ahead_of_its_share() -> None:
    """So the bound holds among its own requests, whatever it was served."""
    server = Server(num_workers=1)
    flood = every(TICK_S, 30.0, cost_ms=1000 * TICK_S, priority=HIGH, tenant="greedy")
    server.run([*flood, Request(at=1.01, name="victim", tenant="greedy", priority=LOW)])
    assert MAX_WAIT_S <= server.waits_of("victim")[0] <= MAX_WAIT_S + TICK_S
