"""The exchange of rate limits on virtual time: its pace, and a store that hangs, fails and comes back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from baton.errors import Overloaded, Unavailable
from router.tenancy.rate_limits import WINDOW_S, RateLimits, Usage
from router.tenancy.rate_sync import RateSync
from router.tenancy.tenants import Tenant
from tests.router.tenancy.usage_board import UsageBoard
from tests.simulation.virtual_loop import VirtualLoop

ME, OTHER = 10, 11
TENANT = Tenant(name="a", requests_per_minute=60)


class FlakyStore(UsageBoard):
    """A board that answers, refuses or never answers; it notes when it was asked, by whom."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "answers"
        self.asked_at: list[float] = []

    async def exchange(self, said: Sequence[Usage], windows: Sequence[int]) -> Sequence[Usage]:
        self.asked_at.append(now())
        if self.mode == "refuses":
            raise Unavailable("Redis is away")
        if self.mode == "hangs":
            # It takes what is said, and the answer is lost.
            self.put(said)
            await asyncio.Event().wait()
        self.put(said)
        return self.get(windows)


def now() -> float:
    return asyncio.get_running_loop().time()


def sync_of(limits: RateLimits, store: FlakyStore, seed: int = 1) -> RateSync:
    return RateSync(limits, store, rng=random.Random(seed), wall=lambda: 1e9 + now())


def on_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()
    assert loop.errors == []


class Running:
    """A sync that runs inside the block."""

    def __init__(self, sync: RateSync) -> None:
        self.sync = sync

    async def __aenter__(self) -> RateSync:
        self.task = asyncio.create_task(self.sync.run())
        return self.sync

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.task.cancelled()


def left(limits: RateLimits) -> int:
    """How many requests are admitted now."""
    for count in range(1000):
        try:
            limits.take(TENANT, now(), 0)
        except Overloaded:
            return count
    raise AssertionError("there is no limit")


def test_it_exchanges_at_once_and_about_once_a_second() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with Running(sync_of(RateLimits([TENANT], ME), store)):
            await asyncio.sleep(100)
        gaps = [after - before for before, after in zip(store.asked_at, store.asked_at[1:], strict=False)]
        assert store.asked_at[0] == 0
        assert 0.8 <= min(gaps) < 0.9
        assert 1.1 < max(gaps) <= 1.2

    on_virtual_time(scenario())


def test_without_limits_nobody_is_asked() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with Running(sync_of(RateLimits([Tenant(name="free")], ME), store)):
            await asyncio.sleep(100)
        assert store.asked_at == []

    on_virtual_time(scenario())


def test_what_one_router_admits_is_missing_at_the_other_within_two_intervals() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        one, other = (RateLimits([TENANT], router) for router in (ME, OTHER))
        async with Running(sync_of(one, store, 1)), Running(sync_of(other, store, 2)):
            await asyncio.sleep(5)
            assert left(one) == 60
            await asyncio.sleep(2.4)
            # Two at most have come back meanwhile.
            assert left(other) <= 2

    on_virtual_time(scenario())


@pytest.mark.parametrize("mode", ["refuses", "hangs"])
def test_a_store_that_is_away_is_asked_ever_less_often_and_logged_once(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        store = FlakyStore()
        async with Running(sync_of(RateLimits([TENANT], ME), store)) as sync:
            await asyncio.sleep(3)
            store.mode, before = mode, len(store.asked_at)
            await asyncio.sleep(120)
            # A pause is 5 s at most and 2.75 s on average, and a hanging store is left after another one.
            assert 120 / 6 < len(store.asked_at) - before < 60
            assert sync.num_failures > 20
            store.mode = "answers"
            await asyncio.sleep(6.1)
            assert sync.num_failures == 0

    on_virtual_time(scenario())
    events = [record.msg["event"] for record in caplog.records if record.name == "router.tenancy.rate_sync"]
    assert events == ["rate limits not shared", "rate limits shared again"]


def test_routers_that_lose_a_store_together_do_not_ask_together() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        store.mode = "refuses"
        syncs = [sync_of(RateLimits([TENANT], seed), store, seed) for seed in range(20)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sync.run()) for sync in syncs]
            await asyncio.sleep(30)
            for task in tasks:
                task.cancel()
        later = sorted(at for at in store.asked_at if at > 0)
        assert max(sum(at <= other < at + 0.05 for other in later) for at in later) <= len(later) / 10

    on_virtual_time(scenario())


@pytest.mark.parametrize("mode", ["refuses", "hangs"])
def test_usage_of_a_time_without_answers_is_heard_once_and_in_full(mode: str) -> None:
    async def scenario() -> None:
        store = FlakyStore()
        one, other = (RateLimits([TENANT], router) for router in (ME, OTHER))
        async with Running(sync_of(one, store, 1)), Running(sync_of(other, store, 2)):
            await asyncio.sleep(3)
            store.mode = mode
            for _ in range(25):
                one.take(TENANT, now(), 0)
                await asyncio.sleep(1)
            store.mode = "answers"
            # Longest pause, then two intervals, and five more until each window has had its turn.
            await asyncio.sleep(5 + 2.4 + 6)
            said = [usage.num_requests for usage in store.counts.values() if usage.router == ME]
            assert sum(said) == 25
            assert 0 <= left(other) - (60 - 25) <= 14

    on_virtual_time(scenario())


@pytest.mark.parametrize("mode", ["refuses", "hangs"])
def test_while_nothing_is_heard_the_others_are_taken_to_go_on(mode: str) -> None:
    async def scenario() -> None:
        store = FlakyStore()
        limits = RateLimits([TENANT], ME)
        async with Running(sync_of(limits, store)):
            for second in range(100):
                # Another router admits one request every two seconds: half of the limit.
                window = int((1e9 + now()) // WINDOW_S)
                total = (second % WINDOW_S + 1) / 2
                store.put([usage_of_another(window, round(total))])
                await asyncio.sleep(1)
            store.mode = mode
            # The first exchange without an answer ends 2.2 s later at most.
            await asyncio.sleep(2.3)
            left(limits)
            await asyncio.sleep(60)
            assert 25 <= left(limits) <= 35

    on_virtual_time(scenario())


def usage_of_another(window: int, num_requests: int) -> Usage:
    return Usage(router=OTHER, tenant="a", window=window, num_requests=num_requests, num_tokens=0)


def test_serving_does_not_wait_for_a_store_that_hangs() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        store.mode = "hangs"
        limits = RateLimits([TENANT], ME)
        async with Running(sync_of(limits, store)):
            await asyncio.sleep(0.5)
            assert left(limits) == 60

    on_virtual_time(scenario())
