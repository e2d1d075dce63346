"""Workers that die under a request: what was delivered stays, and nothing is repeated or skipped."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import KvTransferFailed, PeerLost
from baton.failure import to_failure
from tests.fakes import until
from tests.router.stage import NOTHING, staged, to_decode, to_prefill, workers


async def test_a_prefill_worker_lost_after_the_commit_does_not_matter() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70)
        decode.committed(command.attempt_id)
        await until(lambda: run.received() == [70])
        stage.kill("prefill-0")
        decode.tokens(command.attempt_id, 1, 71, end=True)
        assert await run.answer() == [70, 71]
        assert decode.commands.empty()


async def test_prefill_lost_but_the_kv_had_been_committed() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70)
        stage.kill("prefill-0")
        assert (await decode.command("abort_if_uncommitted")).attempt_id == command.attempt_id
        decode.committed(command.attempt_id)
        decode.tokens(command.attempt_id, 1, 71, end=True)
        assert await run.answer() == [70, 71]
        assert run.generation._timeline.num_attempts == 1


async def test_prefill_lost_before_the_commit_resumes_with_the_delivered_token() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=3)
        command = await to_prefill(prefill, decode)
        other = await stage.prefill("prefill-1", budget=10)
        prefill.first_token(command, 70)
        stage.kill("prefill-0")
        await decode.command("abort_if_uncommitted")
        decode.gone(command.attempt_id)
        # The attempt is given up at the decode worker as well before the next one reserves.
        assert (await decode.command("release")).attempt_id == command.attempt_id
        resumed = await to_prefill(other, decode)
        assert resumed.attempt_id != command.attempt_id
        assert list(resumed.sequence.token_ids) == [*range(20), 70]
        assert resumed.sequence.num_prompt_tokens == 20
        other.first_token(resumed, 71, start=1)
        decode.committed(resumed.attempt_id)
        decode.tokens(resumed.attempt_id, 1, 71)
        decode.tokens(resumed.attempt_id, 2, 72, end=True)
        other.ended(resumed.attempt_id, committed=True)
        assert await run.answer() == [70, 71, 72]
        assert run.generation._timeline.num_attempts == 2
        assert stage.held() == NOTHING


async def test_a_failed_transfer_is_asked_about_and_then_tried_again() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70)
        prefill.ended(command.attempt_id, failure=to_failure(KvTransferFailed("stalled")))
        await decode.command("abort_if_uncommitted")
        decode.gone(command.attempt_id)
        await decode.command("release")
        resumed = await to_prefill(prefill, decode)
        assert list(resumed.sequence.token_ids)[-1] == 70
        prefill.first_token(resumed, 71, start=1, end=True)
        prefill.ended(resumed.attempt_id, finished=True)
        assert await run.answer() == [70, 71]


async def test_a_decode_worker_lost_in_mid_answer_is_replaced_without_a_seam() -> None:
    async with staged() as stage:
        prefill, first = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=5)
        attempt_id = await to_decode(prefill, first)
        first.tokens(attempt_id, 1, 71)
        first.tokens(attempt_id, 2, 72)
        await until(lambda: run.received() == [70, 71, 72])
        stage.kill("decode-0")
        second = await stage.decode("decode-1")
        attempt_id = await to_decode(prefill, second, token_id=73)
        second.tokens(attempt_id, 4, 74, end=True)
        assert await run.answer() == [70, 71, 72, 73, 74]
        assert stage.held() == NOTHING


async def test_a_decode_worker_lost_while_prefill_runs_cancels_the_prefill() -> None:
    async with staged() as stage:
        prefill, first = await workers(stage)
        stage.generate()
        command = await to_prefill(prefill, first)
        stage.kill("decode-0")
        assert (await prefill.command("cancel")).attempt_id == command.attempt_id
        second = await stage.decode("decode-1")
        assert (await second.command("reserve")).attempt_id != command.attempt_id


async def test_a_complete_answer_is_not_started_again_when_workers_die_behind_it() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        await stage.decode("decode-1", num_blocks=10)
        run = stage.generate(max_tokens=1)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70, end=True)
        await until(lambda: run.received() == [70])
        # Its PrefillEnded is still missing when both legs break.
        stage.kill("decode-0")
        await until(lambda: len(list(stage.fleet.decode_links())) == 1)
        await asyncio.sleep(0)
        assert not run.task.done()
        stage.kill("prefill-0")
        assert await run.answer() == [70]


async def test_without_retries_left_the_first_failure_is_the_last() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        while stage.dispatcher.retries.take():
            pass
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        stage.kill("decode-0")
        with pytest.raises(PeerLost):
            await run.answer()
        assert run.generation._timeline.num_attempts == 1
        await prefill.command("cancel")
        prefill.ended(command.attempt_id, cancelled=True)
        await until(lambda: stage.held() == NOTHING)
