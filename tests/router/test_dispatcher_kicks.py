"""Whatever makes room for a request that waits gets it placed at once, whoever else is silent."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from baton.errors import Overloaded
from router.assignment import Assignment, Wanted
from tests.fakes import GUARD_S, until
from tests.router.stage import NOTHING, Stage, failure, staged, to_decode, workers

IDS = (number.to_bytes(16, "big") for number in itertools.count(1))


def wanted(num_tokens: int = 100, **more: Any) -> Wanted:
    now = asyncio.get_running_loop().time()
    facts = {
        "kv_tokens": num_tokens + 60,
        "arrived_at": now,
        "due_at": now + 60.0,
        "keys": None,
        "expected_tokens": num_tokens,
    } | more
    return Wanted(attempt_id=next(IDS), num_tokens=num_tokens, **facts)


def assign(stage: Stage, num_tokens: int = 100, **more: Any) -> asyncio.Task[Assignment]:
    return asyncio.create_task(stage.dispatcher.assign(wanted(num_tokens, **more)))


async def result(task: asyncio.Task[Assignment]) -> Assignment:
    async with asyncio.timeout(GUARD_S):
        return await task


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_blocks_of_a_transfer_that_has_ended_go_to_the_next_prompt() -> None:
    async with staged() as stage:
        prefill = await stage.prefill(budget=4096)
        decode = await stage.decode(num_blocks=1000)
        link = stage.fleet.prefill_links()[0]
        link._capacity.num_blocks = 10
        first = stage.generate(num_prompt_tokens=100, max_tokens=9)
        command = (await decode.grant(), await prefill.command("prefill"))[1]
        prefill.first_token(command, 70)
        await until(lambda: first.received() == [70])
        # Seven of ten blocks are held until their KV has been sent.
        waiting = assign(stage, 100)
        await turns()
        assert not waiting.done()
        prefill.ended(command.attempt_id, committed=True)
        second = await result(waiting)
        assert second.prefill is link
        second.undo()


async def test_blocks_of_a_cancelled_transfer_go_to_the_next_prompt() -> None:
    async with staged() as stage:
        prefill = await stage.prefill(budget=4096)
        decode = await stage.decode(num_blocks=1000)
        link = stage.fleet.prefill_links()[0]
        link._capacity.num_blocks = 10
        first = stage.generate(num_prompt_tokens=100, max_tokens=9)
        command = (await decode.grant(), await prefill.command("prefill"))[1]
        prefill.first_token(command, 70)
        await until(lambda: first.received() == [70])
        waiting = assign(stage, 100)
        await turns()
        assert not waiting.done()
        first.task.cancel()
        assert (await result(waiting)).prefill is link
        waiting.result().undo()


async def test_growth_that_an_answer_does_not_need_any_more_goes_to_the_next_one() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        # Nothing is known of answers: max_tokens are expected.
        run = stage.generate(num_prompt_tokens=20, max_tokens=900)
        attempt_id = await to_decode(prefill, decode)
        await until(lambda: run.received() == [70])
        # It is expected to come to 58 of 64 blocks. The worker's reports stay as they are.
        waiting = assign(stage, 100, expected_tokens=300)
        await turns()
        assert not waiting.done()
        (link,) = stage.fleet.decode_links()
        decode.tokens(attempt_id, 1, 71, end=True)
        # On the same session, long before its heartbeats are missed.
        assert (await result(waiting)).decode is link
        waiting.result().undo()
        assert await run.answer() == [70, 71]
        assert stage.held() == NOTHING


async def test_a_prompt_that_found_no_place_keeps_none_back_that_takes_fewer_blocks_in_the_end() -> None:
    async with staged() as stage:
        await workers(stage)
        running = await result(assign(stage, 100, expected_tokens=600))
        # Of 64 blocks 38 are spoken for: 30 more are too many, 19 are not. A longer prompt, a shorter answer.
        long_answer = assign(stage, 100, expected_tokens=480)
        short_answer = assign(stage, 290, expected_tokens=300)
        await turns()
        assert (long_answer.done(), short_answer.done()) == (False, True)
        running.undo()
        for assignment in (await result(long_answer), short_answer.result()):
            assignment.undo()
        assert stage.held() == NOTHING


async def test_one_prompt_that_found_no_credit_does_not_keep_back_a_smaller_one() -> None:
    async with staged() as stage:
        await stage.prefill(budget=400)
        await stage.decode(num_blocks=1000)
        first = await result(assign(stage, 100))
        large, as_large, small = assign(stage, 390), assign(stage, 390), assign(stage, 120)
        await turns()
        assert (large.done(), as_large.done(), small.done()) == (False, False, True)
        first.undo()
        small.result().undo()
        for task in (large, as_large):
            (await result(task)).undo()
        assert stage.held() == NOTHING


async def test_a_worker_that_cannot_be_sent_to_is_counted_on_by_nobody() -> None:
    async with staged(resume_wait_s=60.0) as stage:
        await stage.prefill()
        decode = await stage.decode()
        (link,) = stage.fleet.decode_links()
        # The session breaks; the first to notice is an attempt that sends, before the one who reads.
        assert link._session is not None
        link._session._other.closed = True  # type: ignore[attr-defined]
        run = stage.generate(num_prompt_tokens=20)
        await turns()
        assert link not in stage.fleet.decode_links()
        another = stage.generate(num_prompt_tokens=20)
        await turns()
        # It waits for the worker to come back, and is not told that it fits nowhere.
        assert not another.task.done()
        stage.dialer.cut("decode-0")
        await until(lambda: decode.num_sessions == 2)
        for one in (run, another):
            one.task.cancel()


async def test_a_request_that_was_displaced_hears_why_and_leaves_nothing() -> None:
    async with staged(max_queue=1) as stage:
        await stage.prefill(budget=50)
        await stage.decode()
        blocker = await result(assign(stage, 50))
        low = stage.generate(num_prompt_tokens=50)
        await until(lambda: len(stage.queue) == 1)
        high = assign(stage, 50, priority=3)
        error = await failure(low)
        assert isinstance(error, Overloaded)
        assert "others came that go first" in error.message
        assert error.retry_after_s == 1.0
        blocker.undo()
        (await result(high)).undo()
        assert stage.held() == NOTHING


async def test_a_request_whose_client_left_before_it_was_displaced_stays_cancelled() -> None:
    async with staged(max_queue=1) as stage:
        await stage.prefill(budget=50)
        await stage.decode()
        await result(assign(stage, 50))
        low = assign(stage, 50)
        await turns()
        low.cancel()
        # Its task has not run since.
        high = assign(stage, 50, priority=3)
        with pytest.raises(asyncio.CancelledError):
            await low
        await turns()
        assert not high.done()
        assert len(stage.queue) == 1
