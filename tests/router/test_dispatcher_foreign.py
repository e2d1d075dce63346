"""What other routers have at a worker is its report less what this router knows of: nothing counts twice."""

from __future__ import annotations

import pytest

from baton.v1 import decode_service_pb2, prefill_service_pb2
from tests.fakes import until
from tests.router.stage import PlayedDecode, PlayedPrefill, Stage, staged, to_decode, workers
from tests.router.test_dispatcher_kicks import assign, result, turns


async def report_of_decode(stage: Stage, worker: PlayedDecode, **load: int) -> None:
    worker.send(heartbeat=decode_service_pb2.DecodeWorkerHeartbeat(**load))  # type: ignore[arg-type]
    (link,) = stage.fleet.decode_links()
    await until(lambda: link._load.num_running == load["num_running"])


async def report_of_prefill(stage: Stage, worker: PlayedPrefill, **load: int) -> None:
    worker.send(heartbeat=prefill_service_pb2.PrefillWorkerHeartbeat(**load))  # type: ignore[arg-type]
    (link,) = stage.fleet.prefill_links()
    await until(lambda: link._load.num_free_blocks == load["num_free_blocks"])


async def test_a_decode_workers_report_of_this_routers_own_answer_adds_nothing() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=900)
        await to_decode(prefill, decode)
        await until(lambda: run.received() == [70])
        (link,) = stage.fleet.decode_links()
        before = link.objection(101, 120)
        await report_of_decode(stage, decode, num_free_blocks=64, num_running=1, num_context_tokens=21)
        assert (link.num_decoding, link.num_context_tokens) == (1, 21)
        assert link.objection(101, 120) == before == ""


async def test_answers_of_others_are_counted_and_grow_as_this_routers_do() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=300)
        attempt_id = await to_decode(prefill, decode)
        await until(lambda: run.received() == [70])
        (link,) = stage.fleet.decode_links()
        await report_of_decode(stage, decode, num_free_blocks=64, num_running=3, num_context_tokens=1021)
        assert (link.num_decoding, link.num_context_tokens) == (3, 1021)
        # Its own answer is to come to 319 tokens, 20 blocks, and has 2: two others like it will take 36 more.
        need = 18 * 3 + 11
        assert link.objection(11 * 16, 0) == (
            f"has 64 free blocks, and with this one the answers there will need {need}"
        )
        assert link.objection(10 * 16, 0) == ""
        decode.tokens(attempt_id, 1, 71, end=True)
        await run.task
        assert (link.num_decoding, link.num_context_tokens) == (2, 1000)


async def test_prompts_that_a_decode_worker_computes_for_others_wait_there_too() -> None:
    async with staged(placement="colocated") as stage:
        decode = await stage.decode(num_blocks=1000)
        own = await result(assign(stage, 100))
        (link,) = stage.fleet.decode_links()
        await report_of_decode(stage, decode, num_free_blocks=900, num_running=1, num_backlog_tokens=100)
        assert link.num_backlog_tokens == 100
        await report_of_decode(stage, decode, num_free_blocks=900, num_running=2, num_backlog_tokens=350)
        assert link.num_backlog_tokens == 350
        own.undo()
        assert link.num_backlog_tokens == 250


@pytest.mark.parametrize(("num_foreign", "fits"), [(0, True), (500, True), (800, True), (993, False)])
async def test_a_prefill_workers_blocks_are_taken_once(num_foreign: int, fits: bool) -> None:
    async with staged() as stage:
        prefill = await stage.prefill(budget=4096)
        await stage.decode(num_blocks=1000)
        # Seven of 1000 blocks, and 100 tokens to compute.
        own = await result(assign(stage, 100))
        (link,) = stage.fleet.prefill_links()
        await report_of_prefill(
            stage,
            prefill,
            num_free_blocks=1000 - 7 - num_foreign,
            num_backlog_tokens=340,
        )
        assert link.num_foreign_tokens == 240
        another = assign(stage, 100)
        await turns()
        assert another.done() is fits
        own.undo()


async def test_a_worker_that_others_have_left_takes_what_waits_here() -> None:
    async with staged() as stage:
        prefill = await stage.prefill(budget=4096)
        await stage.decode(num_blocks=1000)
        await report_of_prefill(stage, prefill, num_free_blocks=3, num_backlog_tokens=0)
        waiting = assign(stage, 100)
        await turns()
        assert not waiting.done()
        await report_of_prefill(stage, prefill, num_free_blocks=1000, num_backlog_tokens=0)
        (await result(waiting)).undo()
