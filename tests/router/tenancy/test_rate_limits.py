"""Rate limits: one router's refusals, and the bound on what several admit together, in simulated time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from baton.errors import Overloaded
from baton.failure import to_failure
from router.tenancy.rate_limits import WINDOW_S, RateLimits, Usage
from router.tenancy.tenants import ANONYMOUS, Tenant
from tests.router.tenancy.usage_board import UsageBoard

ME, OTHER, THIRD = 10, 11, 12
BOTH = Tenant(name="both", requests_per_minute=60, tokens_per_minute=6000)


def limits_of(*tenants: Tenant, router: int = ME) -> RateLimits:
    return RateLimits(tenants, router)


def refusal(limits: RateLimits, tenant: Tenant, now: float, num_tokens: int = 1) -> Overloaded:
    with pytest.raises(Overloaded) as error:
        limits.take(tenant, now, num_tokens)
    return error.value


def test_requests_beyond_the_limit_are_refused_by_its_name_until_there_is_room() -> None:
    limits = limits_of(BOTH)
    for _ in range(60):
        limits.take(BOTH, 0.0, 1)
    error = refusal(limits, BOTH, 0.25)
    assert error.message == "tenant 'both' has used up requests_per_minute, 60; try again in 0.75 s"
    assert (error.field, error.retry_after_s) == ("requests_per_minute", 0.75)
    limits.take(BOTH, 1.0, 1)
    assert refusal(limits, BOTH, 1.0).retry_after_s == 1.0


def test_tokens_beyond_the_limit_are_refused_by_its_name() -> None:
    limits = limits_of(BOTH)
    limits.take(BOTH, 0.0, 5900)
    error = refusal(limits, BOTH, 0.0, 300)
    assert (error.field, error.retry_after_s) == ("tokens_per_minute", 2.0)


def test_of_two_limits_the_one_that_takes_longest_is_named() -> None:
    limits = limits_of(BOTH)
    for _ in range(60):
        limits.take(BOTH, 0.0, 100)
    # One request comes back in 1 s, 3000 tokens in 30.
    error = refusal(limits, BOTH, 0.0, 3000)
    assert (error.field, error.retry_after_s) == ("tokens_per_minute", 30.0)


def test_what_is_refused_takes_nothing() -> None:
    limits = limits_of(BOTH)
    limits.take(BOTH, 0.0, 6000)
    for _ in range(100):
        assert refusal(limits, BOTH, 0.0, 6000).retry_after_s == 60.0
    limits.take(BOTH, 60.0, 6000)
    assert refusal(limits, BOTH, 60.0, 6000).retry_after_s == 60.0


def test_who_comes_back_when_told_is_let_in() -> None:
    tenant = Tenant(name="odd", tokens_per_minute=997)
    limits, rng, now = limits_of(tenant), random.Random(3), 17.3
    limits.take(tenant, now, 5000)
    for _ in range(300):
        num_tokens = rng.randint(1, 1200)
        # As the wire has it, in whole milliseconds.
        retry_after_ms = to_failure(refusal(limits, tenant, now, num_tokens)).retry_after_ms
        assert retry_after_ms > 0
        now += retry_after_ms / 1000
        limits.take(tenant, now, num_tokens)
        limits.charge(tenant, now, 1000)


def test_a_prompt_larger_than_the_limit_waits_for_a_full_bucket() -> None:
    limits = limits_of(BOTH)
    limits.take(BOTH, 0.0, 6000)
    assert refusal(limits, BOTH, 0.0, 9000).retry_after_s == 60.0
    limits.take(BOTH, 60.0, 9000)
    # 3000 below 0: 30 s, and one token more.
    assert refusal(limits, BOTH, 60.0, 1).retry_after_s == pytest.approx(30.01)


def test_output_tokens_count_when_they_are_there() -> None:
    limits = limits_of(BOTH)
    limits.take(BOTH, 0.0, 1000)
    limits.charge(BOTH, 0.0, 8000)
    error = refusal(limits, BOTH, 0.0, 100)
    assert (error.field, error.retry_after_s) == ("tokens_per_minute", 31.0)


def test_who_has_no_limit_is_never_refused_nor_counted() -> None:
    free = Tenant(name="free")
    limits = limits_of(free, ANONYMOUS)
    for _ in range(1000):
        limits.take(free, 0.0, 10**9)
        limits.charge(ANONYMOUS, 0.0, 10**9)
    assert not limits.has_limits
    assert limits.say(0) == []
    assert limits_of(BOTH).has_limits


def test_tenants_do_not_share_a_limit() -> None:
    one, other = (Tenant(name=name, requests_per_minute=1) for name in "ab")
    limits = limits_of(one, other)
    limits.take(one, 0.0, 1)
    assert refusal(limits, one, 0.0).field == "requests_per_minute"
    limits.take(other, 0.0, 1)
    assert refusal(limits, other, 0.0).field == "requests_per_minute"


def usage(window: int, num_requests: int, num_tokens: int, router: int = ME, tenant: str = "both") -> Usage:
    return Usage(
        router=router, tenant=tenant, window=window, num_requests=num_requests, num_tokens=num_tokens
    )


def test_what_is_said_grows_inside_a_window_and_is_said_until_it_is_heard() -> None:
    limits = limits_of(BOTH)
    assert limits.say(100) == []
    limits.take(BOTH, 0.0, 20)
    assert limits.say(100) == [usage(100, 1, 20)]
    limits.charge(BOTH, 0.0, 5)
    assert limits.say(100) == [usage(100, 1, 25)]
    limits.take(BOTH, 0.0, 3)
    assert limits.say(101) == [usage(100, 1, 25), usage(101, 1, 3)]
    limits.hear([], 101, 0.0)
    assert limits.say(101) == []
    limits.take(BOTH, 0.0, 4)
    assert limits.say(101) == [usage(101, 2, 7)]


def test_what_nobody_reads_any_more_is_not_kept() -> None:
    limits = limits_of(BOTH)
    for window in range(100, 200):
        limits.take(BOTH, 0.0 + window, 0)
        said = limits.say(window)
    assert [item.window for item in said] == [*range(193, 200)]


def test_every_window_of_the_last_minute_is_read_again_and_again() -> None:
    limits = limits_of(BOTH)
    assert limits.windows(100) == [94, 95, 96, 97, 98, 99, 100, 101]
    read = set()
    for _ in range(5):
        limits.hear([], 100, 0.0)
        assert limits.windows(100)[-3:] == [99, 100, 101]
        read |= set(limits.windows(100)[:-3])
    assert read == {94, 95, 96, 97, 98}


@pytest.mark.parametrize("window", [94, 97, 99, 100, 101])
def test_a_count_of_another_router_is_drained_once_however_often_it_is_heard(window: int) -> None:
    limits = limits_of(BOTH)
    limits.hear([], 100, 0.0)
    for _ in range(3):
        limits.hear([usage(window, 1, 1000, OTHER)], 100, 0.0)
    limits.hear([usage(window, 1, 1500, OTHER), usage(window, 1, 500, THIRD)], 100, 0.0)
    assert refusal(limits, BOTH, 0.0, 4001).field == "tokens_per_minute"
    limits.take(BOTH, 0.0, 4000)


def test_ones_own_counts_and_strangers_are_not_drained() -> None:
    limits = limits_of(BOTH)
    limits.take(BOTH, 0.0, 2000)
    for _ in range(2):
        said = limits.say(100)
        limits.hear([*said, usage(100, 9, 9000, OTHER, "unknown"), usage(50, 9, 9000, OTHER)], 100, 0.0)
    limits.take(BOTH, 0.0, 4000)
    # All 6,000 of the minute, and no more.
    assert refusal(limits, BOTH, 0.0, 1).field == "tokens_per_minute"


def test_a_store_that_was_emptied_changes_nothing() -> None:
    limits = limits_of(BOTH)
    limits.hear([usage(100, 1, 3000, OTHER)], 100, 0.0)
    limits.hear([], 100, 0.0)
    limits.hear([usage(100, 1, 3000, OTHER)], 100, 0.0)
    assert refusal(limits, BOTH, 0.0, 3001).field == "tokens_per_minute"
    limits.take(BOTH, 0.0, 3000)


def test_a_router_that_starts_knows_the_last_minute() -> None:
    limits = limits_of(BOTH)
    # 6000 a minute ago, of which 1000 came back by each of the five windows since, and 500 now.
    limits.hear([usage(94, 1, 6000, OTHER), usage(100, 1, 500, OTHER)], 100, 0.0)
    assert refusal(limits, BOTH, 0.0, 5501).field == "tokens_per_minute"
    limits.take(BOTH, 0.0, 5500)


class Sim:
    """Routers that exchange once a second over a board, each with a clock of its own, and greedy callers.

    at(router, second) says how many requests come to a router in that second; they come all second long.
    """

    TICKS = 20

    def __init__(self, num_routers: int, tenant: Tenant, *, skew_s: float = 0.0) -> None:
        self.rng = random.Random(11)
        self.board = UsageBoard()
        self.tenant = tenant
        self.routers = [RateLimits([tenant], index) for index in range(num_routers)]
        self.clocks = [self.rng.uniform(-skew_s, skew_s) for _ in self.routers]
        self.admitted: list[tuple[float, int]] = []
        self.is_away = False
        self._next_exchange = [self.rng.uniform(0, 1) for _ in self.routers]
        self._tick = 0

    @property
    def now(self) -> float:
        return self._tick / self.TICKS

    def run(self, seconds: int, at: Callable[[int, int], float]) -> None:
        for _ in range(seconds * self.TICKS):
            for index, limits in enumerate(self.routers):
                if self.now >= self._next_exchange[index]:
                    self.exchange(index)
                for _ in range(round(at(index, int(self.now)) / self.TICKS + self.rng.random() - 0.5)):
                    self.ask(index, limits)
            self._tick += 1

    def ask(self, index: int, limits: RateLimits) -> None:
        try:
            limits.take(self.tenant, self.now, 0)
        except Overloaded:
            return
        self.admitted.append((self.now, index))

    def exchange(self, index: int) -> None:
        limits, window = self.routers[index], int((self.now + self.clocks[index] + 1e6) // WINDOW_S)
        said = limits.say(window)
        if self.is_away:
            limits.lose(self.now)
        else:
            self.board.put(said)
            limits.hear(self.board.get(limits.windows(window)), window, self.now)
        self._next_exchange[index] = self.now + self.rng.uniform(0.8, 1.2)

    def num_admitted(self, since: float = 0.0, router: int | None = None) -> int:
        return sum(at >= since and router in (None, index) for at, index in self.admitted)

    def most_of_one_router(self, span_s: float) -> int:
        """The most that any router admitted within a span."""
        most = 0
        for router in range(len(self.routers)):
            recent: deque[float] = deque()
            for at, index in self.admitted:
                if index == router:
                    recent.append(at)
                    while recent[0] < at - span_s:
                        recent.popleft()
                    most = max(most, len(recent))
        return most


# Two intervals of at most 1.2 s, and a tick.
UNHEARD_S = 2.45


@pytest.mark.parametrize("num_routers", [1, 2, 4])
@pytest.mark.parametrize("per_second", [5.0, 60.0], ids=["brisk", "flood"])
def test_routers_together_admit_no_more_than_the_stated_bound(num_routers: int, per_second: float) -> None:
    sim = Sim(num_routers, Tenant(name="greedy", requests_per_minute=120), skew_s=4.0)
    overshoot = 0.0
    for second in range(200):
        sim.run(1, lambda router, second: per_second)
        overshoot = max(overshoot, sim.num_admitted() - 120 * (1 + (second + 1) / 60))
    assert overshoot <= (num_routers - 1) * sim.most_of_one_router(UNHEARD_S)
    # Nor do they admit less than they might.
    assert sim.num_admitted() >= 0.97 * 120 * (1 + 200 / 60)


def test_without_the_exchange_the_bound_would_not_hold() -> None:
    sim = Sim(4, Tenant(name="greedy", requests_per_minute=120))
    sim.exchange = lambda index: None  # type: ignore[method-assign]
    sim.run(300, lambda router, second: 5.0)
    assert sim.num_admitted() > 120 * (1 + 300 / 60) + 3 * sim.most_of_one_router(UNHEARD_S)


def test_what_was_admitted_too_much_is_paid_back() -> None:
    sim = Sim(4, Tenant(name="greedy", requests_per_minute=120))
    # All of it at once, everywhere, before anybody has heard of anybody.
    sim.run(1, lambda router, second: 2_000.0)
    excess = sim.num_admitted() - 120
    assert 2 * 120 < excess <= 3 * 120 + 4
    sim.run(600, lambda router, second: 10.0)
    assert sim.num_admitted() <= 120 * (1 + 601 / 60) + 3 * sim.most_of_one_router(UNHEARD_S)
    assert sim.num_admitted() - 120 * (1 + 601 / 60) < 30


def test_a_caller_that_moves_between_routers_gets_one_limit_not_two() -> None:
    sim = Sim(2, Tenant(name="mover", requests_per_minute=120))
    sim.run(300, lambda router, second: 10.0 if router == second // 20 % 2 else 0.0)
    assert sim.num_admitted() <= 120 * (1 + 300 / 60) + sim.most_of_one_router(UNHEARD_S)


def test_while_redis_is_away_a_steady_load_stays_at_the_limit() -> None:
    sim = Sim(3, Tenant(name="steady", requests_per_minute=300))
    at = {0: 8.0, 1: 2.0, 2: 2.0}
    sim.run(120, lambda router, second: at[router])
    sim.is_away, lost_at = True, sim.now
    shares = [sim.num_admitted(60.0, router) / 60 for router in range(3)]
    sim.run(300, lambda router, second: at[router])
    during = sim.num_admitted(lost_at) / 300
    # 5 a second are allowed; without an assumption it would be 5 + 2 + 2.
    assert 4.0 < during < 5.8
    for router, share in enumerate(shares):
        assert sim.num_admitted(lost_at, router) / 300 > 0.5 * share
    # What happened meanwhile is drained once, not once as assumed and once as heard.
    sim.is_away, allowed = False, 5 * 420
    sim.run(120, lambda router, second: at[router])
    assert 0.9 * allowed < sim.num_admitted(lost_at) < allowed + 2 * sim.most_of_one_router(UNHEARD_S)


def test_who_served_alone_before_redis_left_goes_on_alone() -> None:
    sim = Sim(2, Tenant(name="moves", requests_per_minute=600))
    sim.run(60, lambda router, second: 20.0 if router == 0 else 0.0)
    sim.is_away, lost_at = True, sim.now
    # The caller changes over to a router that knows another one to take everything: a tenth is left to it.
    sim.run(120, lambda router, second: 20.0 if router == 1 else 0.0)
    assert sim.num_admitted(lost_at) / 120 == pytest.approx(1.0, abs=0.3)
    sim.is_away, back_at = False, sim.now
    sim.run(120, lambda router, second: 20.0 if router == 1 else 0.0)
    assert sim.num_admitted(back_at) / 120 == pytest.approx(10.0, abs=0.5)
