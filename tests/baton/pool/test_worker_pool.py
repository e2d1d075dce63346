"""The set of workers and their lives, on virtual time, over a runtime that is played."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from baton.errors import InvalidRequest, Unavailable
from baton.health import WorkerHealth
from baton.pool.config import PoolConfig
from baton.pool.placing import Ask
from baton.pool.runtime import FoundWorker
from baton.pool.state import State
from baton.pool.worker_pool import WorkerPool
from tests.baton.pool.played_runtime import PlayedRuntime
from tests.idle_role import IdleConfig, IdlePool
from tests.timed_worker import virtually


class SlotConfig(PoolConfig):
    """Asks the played nodes for a slot."""

    def ask(self, role: str):
        return Ask(resources={"slot": 1.0})


def new_pool(runtime: PlayedRuntime, **settings) -> WorkerPool:
    config = SlotConfig(**{"drain_s": 5.0, **settings})
    return IdlePool(config, IdleConfig(), runtime, random.Random(1))


@asynccontextmanager
async def running(number: int, runtime: PlayedRuntime, **settings) -> AsyncIterator[WorkerPool]:
    """A started pool; at the end nothing is left of it."""
    pool = new_pool(runtime, **settings)
    await pool.start(number)
    keeping = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        keeping.cancel()
        await pool.close()
        await asyncio.gather(keeping, return_exceptions=True)
    assert (list(pool.members), runtime.groups) == ([], {})


def states(pool: WorkerPool) -> dict[str, State]:
    return {member.name: member.state for member in pool.members}


def member(pool: WorkerPool, name: str):
    return next(member for member in pool.members if member.name == name)


@virtually
async def test_it_starts_when_its_workers_do() -> None:
    async with running(2, PlayedRuntime(start_s=30.0)) as pool:
        assert asyncio.get_running_loop().time() >= 30.0
        await asyncio.sleep(1.0)
        assert states(pool) == {"decode-0": State.SERVING, "decode-1": State.SERVING}


@virtually
async def test_a_dead_worker_is_started_again_after_pauses_that_grow_and_then_given_up() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    async with running(2, runtime) as pool:
        loop = asyncio.get_running_loop()
        ends, starts = [], []
        for _ in range(4):
            worker = runtime.workers["decode-0"]
            ends.append(loop.time())
            worker.die()
            while runtime.workers["decode-0"] is worker:
                await asyncio.sleep(0.001)
            starts.append(loop.time())
            await asyncio.sleep(0.1)
        pauses = [start - end for start, end in zip(starts, ends, strict=True)]
        # Between half of 0.2 s x 3^n and all of it, and at most 5 s.
        bounds = [(0.1, 0.2), (0.3, 0.6), (0.9, 1.8), (2.5, 5.0)]
        assert all(low <= pause <= high + 0.01 for pause, (low, high) in zip(pauses, bounds, strict=True)), (
            pauses
        )
        runtime.workers["decode-0"].die("out of memory")
        await asyncio.sleep(10.0)
        assert states(pool) == {"decode-0": State.FAILED, "decode-1": State.SERVING}
        assert (member(pool, "decode-0").reason, member(pool, "decode-0").num_restarts) == (
            "out of memory",
            4,
        )
        assert pool.scale(2) == (["decode-0"], [])
        await asyncio.sleep(2.0)
        assert states(pool) == {"decode-0": State.SERVING, "decode-1": State.SERVING}


@virtually
async def test_a_pool_without_a_worker_that_can_be_kept_ends() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    pool = new_pool(runtime)
    await pool.start(1)
    keeping = asyncio.create_task(pool.run())
    for _ in range(5):
        worker = runtime.workers["decode-0"]
        worker.die("out of memory")
        while runtime.workers["decode-0"] is worker and not keeping.done():
            await asyncio.sleep(0.05)
    with pytest.raises(Unavailable, match="decode-0 cannot serve: out of memory"):
        await keeping
    await pool.close()
    assert runtime.groups == {}


@virtually
async def test_a_wrong_setting_is_reported_at_the_start_and_not_retried() -> None:
    runtime = PlayedRuntime(broken="ModelError: no config.json")
    pool = new_pool(runtime)
    with pytest.raises(Unavailable, match="decode-0 cannot serve: ModelError"):
        await pool.start(1)
    await pool.close()
    assert (runtime.log, runtime.groups) == (["start decode-0"], {})


@virtually
async def test_without_room_the_start_says_what_is_missing() -> None:
    runtime = PlayedRuntime(slots={"n1": 1, "n2": 0})
    pool = new_pool(runtime, placement_timeout_s=30.0)
    with pytest.raises(Unavailable) as caught:
        await pool.start(3)
    assert caught.value.message == (
        "Ray found no room for decode-1, decode-2 within 30 s: it asks for slot 1 (PACK); "
        "n1 has slot 0 of 8 free; n2 has slot 0 of 8 free; start fewer workers, ask for less, or add nodes"
    )
    assert 30.0 <= asyncio.get_running_loop().time() < 32.0
    await pool.close()
    assert runtime.groups == {}


@virtually
async def test_a_later_worker_waits_for_room_and_says_so() -> None:
    runtime = PlayedRuntime(slots={"n1": 1})
    async with running(1, runtime) as pool:
        assert pool.scale(2) == (["decode-1"], [])
        await asyncio.sleep(300.0)
        assert states(pool)["decode-1"] is State.PLACING
        assert member(pool, "decode-1").reason == "it asks for slot 1 (PACK); n1 has slot 0 of 8 free"
        runtime.slots["n2"] = 1
        await asyncio.sleep(10.0)
        assert states(pool) == {"decode-0": State.SERVING, "decode-1": State.SERVING}
        assert member(pool, "decode-1").life.place.node_id == "n2"


@pytest.mark.parametrize(
    ("strategy", "nodes"), [("PACK", ["n1", "n1"]), ("SPREAD", ["n1", "n2"]), ("STRICT_SPREAD", ["n1", "n2"])]
)
def test_workers_that_are_placed_together_follow_the_strategy(strategy, nodes) -> None:
    @virtually
    async def check() -> None:
        async with running(2, PlayedRuntime(slots={"n1": 4, "n2": 3}), strategy=strategy) as pool:
            assert sorted(member.life.place.node_id for member in pool.members) == nodes

    check()


@virtually
async def test_scaling_down_removes_the_youngest_and_up_takes_free_numbers() -> None:
    runtime = PlayedRuntime()
    async with running(3, runtime) as pool:
        await asyncio.sleep(1.0)
        pool.drain(member(pool, "decode-1"), dry_run=False, force=False)
        await asyncio.sleep(3.0)
        assert list(states(pool)) == ["decode-0", "decode-2"]
        assert pool.scale(4) == (["decode-1", "decode-3"], [])
        await asyncio.sleep(3.0)
        assert pool.scale(2) == ([], ["decode-3", "decode-2"])
        assert pool.scale(2) == ([], [])
        # Their numbers are free when they are gone, and not before.
        assert pool.scale(3) == (["decode-4"], [])
        await asyncio.sleep(3.0)
        assert list(states(pool)) == ["decode-0", "decode-1", "decode-4"]
        with pytest.raises(InvalidRequest) as caught:
            pool.scale(0)
        assert caught.value.field == "num_workers"


@virtually
async def test_a_worker_drains_before_it_is_removed() -> None:
    runtime = PlayedRuntime(drain_s=4.0)
    async with running(2, runtime) as pool:
        await asyncio.sleep(1.0)
        worker = runtime.workers["decode-1"]
        assert pool.drain(member(pool, "decode-1"), dry_run=True, force=False) == 1
        assert worker.num_drains == 0
        assert pool.drain(member(pool, "decode-1"), dry_run=False, force=False) == 1
        await asyncio.sleep(3.0)
        assert (states(pool)["decode-1"], worker.is_killed) == (State.DRAINING, False)
        await asyncio.sleep(2.0)
        assert list(states(pool)) == ["decode-0"]


@virtually
async def test_a_worker_that_does_not_leave_is_killed_after_its_grace() -> None:
    runtime = PlayedRuntime(drain_s=None)
    async with running(2, runtime, drain_s=5.0) as pool:
        pool.drain(member(pool, "decode-1"), dry_run=False, force=True)
        await asyncio.sleep(14.0)
        assert not runtime.workers["decode-1"].is_killed
        await asyncio.sleep(2.0)
        assert runtime.workers["decode-1"].is_killed
        assert list(states(pool)) == ["decode-0"]


@virtually
async def test_the_last_worker_that_serves_is_not_drained_unless_forced() -> None:
    async with running(2, PlayedRuntime()) as pool:
        await asyncio.sleep(1.0)
        pool.drain(member(pool, "decode-0"), dry_run=False, force=False)
        # One that leaves does not count any more.
        assert pool.drain(member(pool, "decode-1"), dry_run=True, force=False) == 0
        with pytest.raises(InvalidRequest) as caught:
            pool.drain(member(pool, "decode-1"), dry_run=False, force=False)
        assert caught.value.field == "force"
        assert pool.drain(member(pool, "decode-1"), dry_run=False, force=True) == 0
        await asyncio.sleep(3.0)
        assert states(pool) == {}


@virtually
async def test_a_worker_that_leaves_by_itself_is_started_again_and_not_blamed() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    async with running(1, runtime) as pool:
        # More often than deaths in a row are forgiven.
        for number in range(1, 8):
            await asyncio.sleep(1.0)
            runtime.workers["decode-0"].leave()
            await asyncio.sleep(0.1)
            assert member(pool, "decode-0").num_restarts == number
        await asyncio.sleep(1.0)
        assert states(pool) == {"decode-0": State.SERVING}


@virtually
async def test_a_worker_without_progress_is_shown_and_then_replaced() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    async with running(2, runtime) as pool:
        await asyncio.sleep(2.0)
        worker = runtime.workers["decode-0"]
        worker.health = WorkerHealth(is_ready=False, is_alive=False, reason="no step for 40 s")
        await asyncio.sleep(2.0)
        assert (states(pool)["decode-0"], member(pool, "decode-0").reason) == (
            State.UNHEALTHY,
            "no step for 40 s",
        )
        await asyncio.sleep(12.0)
        assert not worker.is_killed
        await asyncio.sleep(4.0)
        assert worker.is_killed
        assert states(pool) == {"decode-0": State.SERVING, "decode-1": State.SERVING}


@virtually
async def test_a_pause_of_11_seconds_costs_no_worker() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    async with running(1, runtime) as pool:
        await asyncio.sleep(1.0)
        runtime.workers["decode-0"].is_silent = True
        await asyncio.sleep(11.0)
        assert states(pool) == {"decode-0": State.UNHEALTHY}
        runtime.workers["decode-0"].is_silent = False
        await asyncio.sleep(4.0)
        assert states(pool) == {"decode-0": State.SERVING}
        assert member(pool, "decode-0").num_restarts == 0


@virtually
async def test_while_ray_is_silent_nobody_is_replaced_and_the_dead_wait() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    async with running(2, runtime) as pool:
        await asyncio.sleep(1.0)
        runtime.silent_s = 1.0
        stopped = runtime.workers["decode-0"]
        stopped.is_silent = True
        runtime.workers["decode-1"].die()
        await asyncio.sleep(120.0)
        assert not stopped.is_killed
        assert states(pool) == {"decode-0": State.UNHEALTHY, "decode-1": State.RESTARTING}
        assert member(pool, "decode-1").reason == "it was killed; Ray's control service does not answer"
        stopped.is_silent = False
        runtime.silent_s = 0.0
        runtime.answering.set()
        await asyncio.sleep(3.0)
        assert states(pool) == {"decode-0": State.SERVING, "decode-1": State.SERVING}
        assert runtime.workers["decode-0"] is stopped


@virtually
async def test_without_ray_the_pool_lives_as_long_as_its_last_worker() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    pool = new_pool(runtime)
    await pool.start(2)
    keeping = asyncio.create_task(pool.run())
    runtime.silent_s, runtime.is_gone = 10.0, True
    runtime.workers["decode-0"].die()
    await asyncio.sleep(60.0)
    assert not keeping.done()
    runtime.workers["decode-1"].die()
    with pytest.raises(Unavailable, match="Ray's control service has ended and no decode worker is left"):
        await keeping
    await pool.close()


@virtually
async def test_workers_of_an_earlier_pool_are_taken_over_and_renewed_one_by_one_if_outdated() -> None:
    runtime = PlayedRuntime(start_s=2.0)
    first = new_pool(runtime)
    await first.start(3)
    handles = dict(runtime.workers)
    await first.close(is_kept=True)
    assert list(first.members) == []
    assert not any(worker.is_killed for worker in handles.values())
    runtime.left = [FoundWorker(handle=worker, facts=await worker.facts()) for worker in handles.values()]

    second = new_pool(runtime)
    await second.start(3)
    assert runtime.workers == handles
    assert not any(worker.num_drains for worker in handles.values())
    await second.close(is_kept=True)

    third = new_pool(runtime, log_dir="/elsewhere")
    await third.start(3)
    keeping = asyncio.create_task(third.run())
    served = []
    while (
        any(worker.num_drains == 0 or not worker.is_killed for worker in handles.values())
        or len(served) < 300
    ):
        served.append(sum(state is State.SERVING for state in states(third).values()))
        await asyncio.sleep(0.1)
    assert min(served[20:]) == 2
    assert [member.num_restarts for member in third.members] == [1, 1, 1]
    keeping.cancel()
    await third.close()
    assert runtime.groups == {}


@virtually
async def test_too_many_workers_of_an_earlier_pool_are_drained() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    first = new_pool(runtime)
    await first.start(3)
    runtime.left = [
        FoundWorker(handle=worker, facts=await worker.facts()) for worker in runtime.workers.values()
    ]
    await first.close(is_kept=True)
    second = new_pool(runtime)
    await second.start(1)
    await asyncio.sleep(3.0)
    assert states(second) == {"decode-0": State.SERVING}
    await second.close()


def test_a_workers_repr_shows_no_password() -> None:
    @virtually
    async def check() -> None:
        async with running(1, PlayedRuntime()) as pool:
            (only,) = pool.members
            assert "settings" not in repr(only.spec)

    check()


def test_growth_takes_no_number_twice() -> None:
    @virtually
    async def check() -> None:
        async with running(5, PlayedRuntime()) as pool:
            numbers = [int(member.name.removeprefix("decode-")) for member in pool.members]
            assert all(second - first == 1 for first, second in pairwise(numbers))

    check()
