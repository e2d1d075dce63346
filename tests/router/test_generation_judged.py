"""What an attempt says about its workers, and how many attempts a request gets."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from baton.errors import Overloaded, Unavailable
from router.assignment import Wanted
from router.breaker import NUM_FAILURES
from tests.fakes import until
from tests.router.stage import NOTHING, failure, staged, to_decode, to_prefill, workers


async def test_an_answer_that_is_stopped_speaks_for_its_workers() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        links = stage.fleet.links
        for link in links:
            for _ in range(NUM_FAILURES - 1):
                link.breaker.failed(0.0)
        assert stage.dispatcher.retries.take()
        left = stage.dispatcher.retries._left
        run = stage.generate(max_tokens=9)
        await to_decode(prefill, decode)
        await until(lambda: run.received() == [70])
        run.generation.stop()
        run.task.cancel()
        with suppress(asyncio.CancelledError):
            await run.task
        assert [link.breaker._num_failures for link in links] == [0, 0]
        assert stage.dispatcher.retries._left > left
        assert stage.held() == NOTHING


async def test_an_answer_that_its_client_leaves_says_nothing() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        for link in stage.fleet.links:
            link.breaker.failed(0.0)
        run = stage.generate(max_tokens=9)
        await to_decode(prefill, decode)
        await until(lambda: run.received() == [70])
        run.task.cancel()
        with suppress(asyncio.CancelledError):
            await run.task
        assert [link.breaker._num_failures for link in stage.fleet.links] == [1, 1]


async def test_an_attempt_that_reached_nobody_leaves_no_probe_behind() -> None:
    async with staged() as stage:
        await workers(stage)
        now = asyncio.get_running_loop().time()
        for link in stage.fleet.links:
            for _ in range(NUM_FAILURES):
                link.breaker.failed(now - 60)
        wanted = Wanted(
            attempt_id=b"a" * 16,
            num_tokens=10,
            kv_tokens=12,
            expected_tokens=12,
            keys=None,
            arrived_at=now,
            due_at=now,
        )
        assignment = await stage.dispatcher.assign(wanted)
        assert not any(link.breaker.allows(now) for link in stage.fleet.links)
        assignment.undo()
        assert all(link.breaker.allows(now) for link in stage.fleet.links)
        assert stage.held() == NOTHING


async def test_attempts_are_counted_from_the_last_commit() -> None:
    async with staged(max_attempts=2, resume_wait_s=30.0) as stage:
        prefill = await stage.prefill()
        run = stage.generate(max_tokens=9)
        for number in range(3):
            decode = await stage.decode(f"decode-{number}")
            await to_decode(prefill, decode, token_id=70 + number)
            await until(lambda count=number + 1: len(run.received()) == count)  # type: ignore[misc]
            stage.kill(f"decode-{number}")
        decode = await stage.decode("decode-3")
        command = await to_prefill(prefill, decode)
        assert list(command.sequence.token_ids)[20:] == [70, 71, 72]
        # Two failures with no commit between them are the most that this router allows.
        stage.kill("decode-3")
        assert isinstance(await failure(run), Unavailable)


async def test_the_queues_bound_is_for_requests_and_not_for_their_further_answers() -> None:
    async with staged(max_queue=1) as stage:
        # Nobody has credit for anything.
        await stage.prefill(budget=1)
        await stage.decode()
        stage.generate()
        await until(lambda: len(stage.queue) == 0)
        stage.generate()
        await until(lambda: len(stage.queue) == 1)
        assert isinstance(await failure(stage.generate()), Overloaded)
        stage.generate(sample_index=1)
        await until(lambda: len(stage.queue) == 2)


@pytest.mark.parametrize("stop_first", [True, False])
async def test_stopping_what_has_ended_counts_once(stop_first: bool) -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        for _ in range(9):
            assert stage.dispatcher.retries.take()
        left = stage.dispatcher.retries._left
        run = stage.generate(max_tokens=1)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70, end=True)
        await until(lambda: run.received() == [70])
        if stop_first:
            run.generation.stop()
        prefill.ended(command.attempt_id, finished=True)
        await run.answer()
        if not stop_first:
            run.generation.stop()
        assert stage.dispatcher.retries._left == pytest.approx(left + 0.1)
