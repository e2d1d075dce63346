"""Placement: late, even, and with everything given back when an attempt does not happen."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from baton.errors import Overloaded, Unavailable
from router.assignment import Assignment, Wanted
from tests.fakes import GUARD_S, until
from tests.router.stage import NOTHING, Stage, info_of, staged

IDS = (number.to_bytes(16, "big") for number in itertools.count(1))


def wanted(num_tokens: int = 100, kv_tokens: int = 160, **more: Any) -> Wanted:
    now = asyncio.get_running_loop().time()
    facts = {"arrived_at": now, "due_at": now + 60.0, "keys": None, "expected_tokens": num_tokens} | more
    return Wanted(attempt_id=next(IDS), num_tokens=num_tokens, kv_tokens=kv_tokens, **facts)


def assign(stage: Stage, num_tokens: int = 100, kv_tokens: int = 160) -> asyncio.Task[Assignment]:
    loop = asyncio.get_running_loop()
    return loop.create_task(stage.dispatcher.assign(wanted(num_tokens, kv_tokens)))


async def result(task: asyncio.Task[Assignment]) -> Assignment:
    async with asyncio.timeout(GUARD_S):
        return await task


async def cancelled(task: asyncio.Task[Assignment]) -> None:
    task.cancel()
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait([task])
    assert task.cancelled()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_burst_of_equal_prompts_spreads_evenly() -> None:
    async with staged() as stage:
        for number in range(4):
            await stage.prefill(f"prefill-{number}", budget=4096)
            await stage.decode(f"decode-{number}", num_blocks=1000)
        tasks = [assign(stage, num_tokens=100) for _ in range(40)]
        assignments = [await result(task) for task in tasks]
        assert sorted(Counter(a.prefill.name for a in assignments).values()) == [10, 10, 10, 10]
        assert sorted(Counter(a.decode.name for a in assignments).values()) == [10, 10, 10, 10]
        assert stage.held()["spent"] == 40 * 100


async def test_both_credit_and_blocks_are_needed() -> None:
    async with staged() as stage:
        prefill = await stage.prefill(budget=100)
        await stage.decode(num_blocks=10)
        first = await result(assign(stage, num_tokens=95, kv_tokens=160))
        waiting = assign(stage, num_tokens=95, kv_tokens=160)
        await turns()
        assert not waiting.done()
        prefill.grant(95)
        await until(lambda: stage.fleet.links[1].credit == 100)
        # There is credit now, but the first attempt still counts on six of ten blocks.
        assert not waiting.done()
        first.decode.detach(first.attempt_id)
        assert (await result(waiting)).decode is first.decode


async def test_a_prompt_longer_than_all_credit_costs_what_is_not_kept_for_shorter_ones() -> None:
    async with staged() as stage:
        await stage.prefill(budget=100)
        await stage.decode(num_blocks=1000)
        short = await result(assign(stage, num_tokens=30))
        long = assign(stage, num_tokens=5000)
        await turns()
        assert not long.done()
        short.undo()
        # A quarter is kept.
        assert (await result(long)).cost == 75
        another, other_short = assign(stage, num_tokens=5000), assign(stage, num_tokens=25)
        assert (await result(other_short)).cost == 25
        assert not another.done()


async def test_a_cancelled_wait_leaves_nothing() -> None:
    async with staged() as stage:
        await stage.prefill(budget=50)
        await stage.decode()
        first = await result(assign(stage, num_tokens=50))
        waiting = assign(stage, num_tokens=50)
        await turns()
        assert len(stage.queue) == 1
        await cancelled(waiting)
        assert len(stage.queue) == 0
        first.undo()
        assert stage.held() == NOTHING


async def test_cancelled_right_after_the_assignment_returns_credit_and_blocks_to_the_next() -> None:
    async with staged() as stage:
        prefill = await stage.prefill(budget=50)
        await stage.decode(num_blocks=10)
        blocker = await result(assign(stage, num_tokens=50, kv_tokens=160))
        chosen, next_in_line = assign(stage, num_tokens=50, kv_tokens=160), assign(stage, 50, 160)
        await turns()
        blocker.undo()
        # Assigned, but its task has not run since.
        assert stage.held()["spent"] == 50
        await cancelled(chosen)
        assert (await result(next_in_line)).cost == 50
        assert prefill.commands.empty()
        next_in_line.result().undo()
        assert stage.held() == NOTHING


async def test_a_cancel_that_meets_a_failure_stays_a_cancel() -> None:
    async with staged(resume_wait_s=60.0) as stage:
        await stage.prefill()
        await stage.decode()
        stage.kill("prefill-0")
        await until(lambda: not stage.fleet.is_complete)
        waiting = assign(stage)
        await turns()
        assert not waiting.done()
        stage.dispatcher._declare_down()
        await cancelled(waiting)


async def test_once_a_role_is_known_to_be_missing_a_request_fails_at_once() -> None:
    async with staged(resume_wait_s=0.05) as stage:
        # A router that has just started knows nobody yet; the first request waits out the grace.
        with pytest.raises(Unavailable):
            await result(assign(stage))
        stage.dispatcher._grace_s = 60.0
        with pytest.raises(Unavailable, match=r"no (decode|prefill) worker is connected") as error:
            await result(assign(stage))
        assert error.value.retry_after_s == 5.0
        assert stage.held() == NOTHING


async def test_when_the_last_worker_of_a_role_goes_requests_wait_for_the_grace_time() -> None:
    async with staged(resume_wait_s=0.2) as stage:
        await stage.prefill()
        await stage.decode()
        stage.kill("decode-0")
        await until(lambda: not stage.fleet.is_complete)
        started = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable):
            await result(assign(stage))
        assert asyncio.get_running_loop().time() - started > 0.1
        # From now on nobody waits.
        with pytest.raises(Unavailable):
            async with asyncio.timeout(0.1):
                await assign(stage)


async def test_a_worker_that_appears_within_the_grace_time_takes_what_waits() -> None:
    async with staged(resume_wait_s=60.0) as stage:
        await stage.prefill()
        await stage.decode("decode-0")
        stage.kill("decode-0")
        await until(lambda: not stage.fleet.is_complete)
        waiting = assign(stage)
        await turns()
        await stage.decode("decode-1")
        assert (await result(waiting)).decode.name == "decode-1"


async def test_after_the_grace_time_a_new_worker_makes_everything_well_again() -> None:
    async with staged(resume_wait_s=0.01) as stage:
        await stage.prefill()
        with pytest.raises(Unavailable):
            await result(assign(stage))
        await stage.decode()
        assert (await result(assign(stage))).decode.name == "decode-0"


async def test_tickets_survive_the_loss_of_one_of_two_workers() -> None:
    async with staged() as stage:
        await stage.prefill("prefill-0", budget=50)
        await stage.prefill("prefill-1", budget=50)
        await stage.decode()
        held = [await result(assign(stage, num_tokens=50)) for _ in range(2)]
        waiting = assign(stage, num_tokens=50)
        await turns()
        stage.kill("prefill-0")
        await until(lambda: len(list(stage.fleet.prefill_links())) == 1)
        assert not waiting.done()
        for assignment in held:
            assignment.undo()
        assert (await result(waiting)).prefill.name == "prefill-1"


async def test_credit_dies_with_the_session() -> None:
    async with staged() as stage:
        worker = await stage.prefill(budget=100)
        await stage.decode()
        held = await result(assign(stage, num_tokens=60))
        (lost,) = stage.fleet.prefill_links()
        stage.dialer.cut("prefill-0")
        await until(lambda: not lost.is_ready)
        assert (lost.credit, lost.spent) == (0, 0)
        await until(lambda: worker.num_sessions == 2 and stage.fleet.is_complete)
        (link,) = stage.fleet.prefill_links()
        await until(lambda: link.credit == 100)
        held.undo()
        assert (link.credit, link.spent) == (100, 0)


async def test_a_draining_worker_gets_no_new_requests() -> None:
    async with staged() as stage:
        leaving, _staying = await stage.prefill("prefill-0"), await stage.prefill("prefill-1")
        await stage.decode()
        stage.registry.announce(info_of(leaving, "prefill", draining=True))
        await until(lambda: len(list(stage.fleet.prefill_links())) == 1)
        names = {(await result(assign(stage, num_tokens=10))).prefill.name for _ in range(6)}
        assert names == {"prefill-1"}


async def test_what_no_connected_worker_can_ever_hold_blocks_nobody() -> None:
    async with staged(max_wait_s=0.0) as stage:
        await stage.prefill()
        await stage.decode("small", num_blocks=10)
        await stage.decode("large", num_blocks=100)
        full = await result(assign(stage, num_tokens=1500, kv_tokens=100 * 16))
        assert full.decode.name == "large"
        big = assign(stage, num_tokens=700, kv_tokens=50 * 16)
        await turns()
        assert not big.done()
        stage.kill("large")
        with pytest.raises(Unavailable, match="800 tokens"):
            await result(big)
        assert (await result(assign(stage, kv_tokens=5 * 16))).decode.name == "small"


async def test_a_full_queue_refuses_new_requests_only() -> None:
    async with staged(max_queue=1) as stage:
        await stage.prefill(budget=10)
        await stage.decode()
        await result(assign(stage, num_tokens=10))
        waiting = assign(stage, num_tokens=10)
        await turns()
        with pytest.raises(Overloaded):
            await result(assign(stage, num_tokens=10))
        again = asyncio.create_task(stage.dispatcher.assign(wanted(10, 10, arrived_at=0.0, is_new=False)))
        await turns()
        assert len(stage.queue) == 2
        assert not waiting.done()
        await cancelled(again)
        await cancelled(waiting)


async def test_close_cancels_the_timer() -> None:
    async with staged(resume_wait_s=60.0) as stage:
        await stage.prefill()
        await stage.decode()
        stage.kill("decode-0")
        await until(lambda: stage.dispatcher._give_up is not None)
        timer = stage.dispatcher._give_up
        stage.dispatcher.close()
        assert timer is not None
        assert timer.cancelled()


async def test_workers_that_failed_a_request_are_taken_only_if_no_other_can() -> None:
    async with staged() as stage:
        for number in range(2):
            await stage.prefill(f"prefill-{number}")
            await stage.decode(f"decode-{number}")
        first = await assign(stage, 10, 10)
        bad = frozenset({first.prefill.info.incarnation, first.decode.info.incarnation})
        first.undo()
        # Whoever's turn it would be.
        for _ in range(4):
            other = await stage.dispatcher.assign(wanted(10, 10, avoid=bad))
            assert other.prefill is not first.prefill
            assert other.decode is not first.decode
            other.undo()
        everybody = frozenset(link.info.incarnation for link in stage.fleet.links)
        again = await stage.dispatcher.assign(wanted(10, 10, avoid=everybody))
        again.undo()


async def test_a_worker_whose_breaker_is_open_gets_nothing_unless_it_is_the_only_one() -> None:
    async with staged() as stage:
        await stage.prefill("prefill-0", budget=4096)
        await stage.decode("decode-0")
        now = asyncio.get_running_loop().time()
        for link in stage.fleet.links:
            for _ in range(5):
                link.breaker.failed(now)
        alone = await result(assign(stage))
        assert (alone.prefill.name, alone.decode.name) == ("prefill-0", "decode-0")
        alone.undo()
        await stage.prefill("prefill-1", budget=50)
        await stage.decode("decode-1")
        # prefill-0 has far more credit; it is still not chosen.
        other = await result(assign(stage, 20, 30))
        assert (other.prefill.name, other.decode.name) == ("prefill-1", "decode-1")
        other.undo()
