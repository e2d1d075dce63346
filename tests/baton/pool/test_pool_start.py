"""How a pool starts, and takes over what an earlier one has left, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import ModelError, Unavailable
from baton.pool.runtime import FoundWorker, WorkerLost
from baton.pool.state import State
from tests.baton.pool.played_pool import new_pool, running, states
from tests.baton.pool.played_runtime import PlayedRuntime, PlayedWorker
from tests.timed_worker import virtually


@virtually
async def test_it_starts_when_its_workers_do() -> None:
    async with running(2, PlayedRuntime(start_s=30.0)) as pool:
        assert asyncio.get_running_loop().time() >= 30.0
        await asyncio.sleep(1.0)
        assert states(pool) == {"decode-0": State.SERVING, "decode-1": State.SERVING}


@virtually
async def test_a_wrong_setting_is_reported_at_the_start_and_not_retried() -> None:
    runtime = PlayedRuntime(broken=WorkerLost("no config.json", ModelError))
    pool = new_pool(runtime)
    with pytest.raises(ModelError, match=r"decode-0 cannot serve: no config\.json"):
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


async def left_by_an_earlier_pool(runtime: PlayedRuntime, number: int, **settings) -> dict[str, PlayedWorker]:
    """Workers that serve, and that the next pool will find."""
    pool = new_pool(runtime, **settings)
    await pool.start(number)
    workers = dict(runtime.workers)
    await pool.close(is_kept=True)
    runtime.left = [FoundWorker(handle=worker, facts=await worker.facts()) for worker in workers.values()]
    return workers


@virtually
async def test_a_worker_that_was_taken_over_and_dies_at_the_start_is_started_again() -> None:
    runtime = PlayedRuntime(start_s=10.0)
    left = await left_by_an_earlier_pool(runtime, 2)
    pool = new_pool(runtime)
    starting = asyncio.create_task(pool.start(3))
    await asyncio.sleep(1.0)
    left["decode-0"].die("out of memory")
    await starting
    await asyncio.sleep(10.0)
    assert states(pool) == dict.fromkeys(("decode-0", "decode-1", "decode-2"), State.SERVING)
    assert [member.num_restarts for member in pool.members] == [1, 0, 0]
    await pool.close()


@virtually
async def test_a_start_without_room_leaves_the_workers_that_serve_and_nothing_else() -> None:
    runtime = PlayedRuntime(slots={"n1": 3}, start_s=1.0)
    left = await left_by_an_earlier_pool(runtime, 2)
    runtime.start_s = 1e6
    pool = new_pool(runtime, placement_timeout_s=30.0)
    with pytest.raises(Unavailable, match="no room for decode-3"):
        await pool.start(4)
    await pool.close(is_kept=True)
    assert [(worker.num_drains, worker.is_killed) for worker in left.values()] == [(0, False)] * 2
    # decode-2 had a place and did not serve yet; decode-3 had none.
    assert runtime.workers["decode-2"].is_killed
    assert sorted(group.partition("/")[0] for group in runtime.groups) == ["decode-0", "decode-1"]


@virtually
async def test_a_scale_during_the_start_holds() -> None:
    runtime = PlayedRuntime(start_s=5.0)
    pool = new_pool(runtime)
    starting = asyncio.create_task(pool.start(2))
    await asyncio.sleep(1.0)
    assert pool.scale(3) == (["decode-2"], [])
    await starting
    await asyncio.sleep(5.0)
    assert list(states(pool)) == ["decode-0", "decode-1", "decode-2"]
    assert pool.scale(1) == ([], ["decode-2", "decode-1"])
    await pool.close()


def test_new_settings_with_which_a_worker_cannot_start_cost_one_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @virtually
    async def play() -> None:
        runtime = PlayedRuntime(start_s=0.0)
        left = await left_by_an_earlier_pool(runtime, 3)
        runtime.broken = WorkerLost("no config.json")
        async with running(3, runtime, log_dir="/elsewhere") as pool:
            await asyncio.sleep(60.0)
            assert list(states(pool).values()) == [State.FAILED, State.SERVING, State.SERVING]
            assert [worker.num_drains for worker in left.values()] == [1, 0, 0]

    play()
    told = [record.msg for record in caplog.records if record.msg["event"] == "no more workers are renewed"]
    assert [(line["worker"], line["reason"]) for line in told] == [("decode-0", "no config.json")]


@virtually
async def test_one_that_has_died_has_the_new_settings_and_is_not_renewed() -> None:
    runtime = PlayedRuntime(start_s=2.0)
    left = await left_by_an_earlier_pool(runtime, 3)
    async with running(3, runtime, log_dir="/elsewhere") as pool:
        left["decode-1"].die()
        await asyncio.sleep(60.0)
        assert [worker.num_drains for worker in left.values()] == [1, 0, 1]
        assert [member.num_restarts for member in pool.members] == [1, 1, 1]


@virtually
async def test_what_is_reserved_for_a_worker_that_is_not_wanted_any_more_is_freed() -> None:
    runtime = PlayedRuntime(reserve_s=3.0)
    pool = new_pool(runtime)
    starting = asyncio.create_task(pool.start(1))
    await asyncio.sleep(1.0)
    starting.cancel()
    await pool.close()
    assert asyncio.get_running_loop().time() >= 3.0
    assert (runtime.groups, runtime.slots) == ({}, {"n1": 8})


@virtually
async def test_a_start_that_hangs_ends_with_a_reason() -> None:
    runtime = PlayedRuntime(start_s=1e6)
    pool = new_pool(runtime, start_timeout_s=600.0)
    with pytest.raises(Unavailable, match="decode-0 cannot serve: it has not come to serve within 600 s"):
        await pool.start(1)
    assert 600.0 <= asyncio.get_running_loop().time() < 610.0
    await pool.close()
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
