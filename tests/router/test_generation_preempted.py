"""Requests that give way at a decode worker, and attempts without a prefill worker."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.v1 import common_pb2, decode_service_pb2
from tests.fakes import until
from tests.router.stage import NOTHING, PlayedDecode, Stage, staged, to_decode, to_prefill, workers


def gives_way(decode: PlayedDecode, attempt_id: bytes) -> None:
    decode.send(preempted=decode_service_pb2.Preempted(attempt_id=attempt_id))


async def test_a_preempted_request_goes_on_with_its_tokens_and_blames_nobody() -> None:
    async with staged(max_attempts=1) as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=4)
        attempt_id = await to_decode(prefill, decode)
        decode.tokens(attempt_id, 1, 71)
        gives_way(decode, attempt_id)
        resumed = await to_prefill(prefill, decode)
        assert list(resumed.sequence.token_ids) == [*range(20), 70, 71]
        assert resumed.attempt_id != attempt_id
        prefill.first_token(resumed, 72, start=2)
        decode.committed(resumed.attempt_id)
        decode.tokens(resumed.attempt_id, 3, 73, end=True)
        prefill.ended(resumed.attempt_id, committed=True)
        assert await run.answer() == [70, 71, 72, 73]
        timeline = run.generation._timeline
        assert (timeline.num_attempts, timeline.num_preemptions) == (1, 1)
        assert all(link.breaker._num_failures == 0 for link in stage.fleet.links)
        assert stage.held() == NOTHING


async def test_a_preempted_request_keeps_its_place_in_line() -> None:
    async with staged() as stage:
        prefill, decode = await stage.prefill(budget=40), await stage.decode()
        stage.generate(num_prompt_tokens=20, max_tokens=4)
        attempt_id = await to_decode(prefill, decode)
        # No credit is left for anybody who comes now.
        stage.generate(num_prompt_tokens=40)
        computed = await to_prefill(prefill, decode)
        stage.generate(num_prompt_tokens=20)
        gives_way(decode, attempt_id)
        await until(lambda: len(stage.queue) == 2)
        prefill.first_token(computed, 90)
        # Both fit now; the one that gave way has been here longer.
        assert len((await decode.grant()).sequence.token_ids) == 21


async def started_beside(stage: Stage, num_free: int) -> tuple[Any, Any, Any]:
    prefill, decode = await stage.prefill(), await stage.decode(num_blocks=num_free)
    link = next(link for link in stage.fleet.decode_links() if link.name == "decode-0")
    return prefill, decode, stage.generate(num_prompt_tokens=30, max_tokens=2, beside=link)


async def test_a_child_starts_where_its_prompt_is_without_a_prefill_worker() -> None:
    async with staged() as stage:
        prefill, decode, run = await started_beside(stage, 64)
        command = await decode.grant()
        assert command.compute_locally
        decode.committed(command.attempt_id)
        await asyncio.sleep(0.01)
        # The lease is; the prompt is not computed yet.
        assert not run.generation.committed.done()
        decode.send(prompt_computed={"attempt_id": command.attempt_id, "prefill": {"num_steps": 1}})
        decode.tokens(command.attempt_id, 0, 70)
        assert (await run.generation.committed).name == "decode-0"
        decode.tokens(command.attempt_id, 1, 71, end=True)
        assert await run.answer() == [70, 71]
        assert prefill.commands.empty()
        assert stage.held() == NOTHING


async def test_a_child_takes_the_full_path_where_there_is_no_room_beside_its_brother() -> None:
    async with staged() as stage:
        other = await stage.decode("decode-1")
        prefill, decode, _ = await started_beside(stage, 1)
        command = await to_prefill(prefill, other)
        assert len(command.sequence.token_ids) == 30
        assert decode.commands.empty()


async def test_a_child_that_is_refused_beside_its_brother_waits_its_turn() -> None:
    async with staged() as stage:
        prefill, decode, _ = await started_beside(stage, 64)
        await decode.refuse(common_pb2.Failure(code="OVERLOADED", message="full", retry_after_ms=1))
        # The attempt is given up before it is made again, now like any other.
        await decode.command("release")
        command = await to_prefill(prefill, decode)
        assert len(command.sequence.token_ids) == 30


async def test_a_request_that_ends_without_a_commit_says_so() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=1)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70, end=True)
        prefill.ended(command.attempt_id, finished=True)
        assert await run.answer() == [70]
        assert await run.generation.committed is None
