"""The set of workers and their lives, on virtual time, over a runtime that is played."""

from __future__ import annotations

import asyncio
import gc
import weakref
from itertools import pairwise

import pytest

from baton.errors import InvalidRequest, Unavailable
from baton.health import WorkerHealth
from baton.pool.runtime import WorkerLost
from baton.pool.state import State
from tests.baton.pool.played_pool import member, new_pool, running, states
from tests.baton.pool.played_runtime import PlayedRuntime
from tests.timed_worker import virtually


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
        for number in (0, 1_025):
            with pytest.raises(InvalidRequest) as caught:
                pool.scale(number)
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
        with pytest.raises(InvalidRequest, match="no other decode worker serves: without decode-1") as caught:
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
async def test_a_worker_that_hangs_while_it_starts_again_is_replaced() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    async with running(2, runtime, start_timeout_s=600.0) as pool:
        await asyncio.sleep(1.0)
        first, runtime.start_s = runtime.workers["decode-0"], 1e6
        first.die()
        await asyncio.sleep(10.0)
        hanging, runtime.start_s = runtime.workers["decode-0"], 0.0
        assert hanging is not first
        await asyncio.sleep(600.0)
        assert (hanging.is_killed, states(pool)["decode-0"]) == (True, State.SERVING)


def test_the_log_tells_a_drain_that_failed_and_a_planned_start_from_a_death(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    runtime = PlayedRuntime(start_s=0.0, drain_s=None)

    @virtually
    async def play() -> None:
        async with running(2, runtime, drain_s=5.0) as pool:
            await asyncio.sleep(1.0)
            runtime.workers["decode-0"].leave()
            await asyncio.sleep(1.0)
            runtime.workers["decode-0"].die("out of memory")
            await asyncio.sleep(1.0)
            pool.drain(member(pool, "decode-1"), dry_run=False, force=False)
            await asyncio.sleep(20.0)
            runtime.workers["decode-0"].leave()

    play()
    lines = [(record.levelname, record.msg) for record in caplog.records]
    told = [
        (level, line["worker"], line["reason"])
        for level, line in lines
        if line["event"] in ("worker starts again", "worker is killed")
    ]
    assert told[:3] == [
        ("INFO", "decode-0", "it left after a signal, or for new settings"),
        ("WARNING", "decode-0", "out of memory"),
        ("WARNING", "decode-1", "it has not left in 15 s"),
    ]


@virtually
async def test_a_worker_that_was_given_up_is_forgotten_when_it_is_tried_again() -> None:
    runtime = PlayedRuntime(start_s=0.0)
    async with running(2, runtime) as pool:
        runtime.broken = WorkerLost("out of memory")
        runtime.workers["decode-0"].die()
        await asyncio.sleep(60.0)
        given_up = weakref.ref(member(pool, "decode-0"))
        assert given_up().state is State.FAILED
        runtime.broken = None
        pool.scale(2)
        await asyncio.sleep(2.0)
        gc.collect()
        assert given_up() is None


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
