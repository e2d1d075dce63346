"""One request's drive against workers that the test plays: every order of events, every way to fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvTransferFailed,
    NonFiniteLogits,
    Overloaded,
    PeerLost,
    Unavailable,
)
from baton.failure import to_failure
from baton.v1 import common_pb2
from tests.fakes import until
from tests.router.stage import NOTHING, failure, staged, to_decode, to_prefill, workers

LENGTH = common_pb2.FINISH_REASON_LENGTH


async def test_a_request_goes_through_reservation_prefill_and_decode() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=3, seed=5)
        reserve = await decode.grant()
        assert list(reserve.sequence.token_ids) == list(range(20))
        assert (reserve.sequence.num_prompt_tokens, reserve.sequence.sampling.max_tokens) == (20, 3)
        command = await prefill.command("prefill")
        command.sequence.age_ms = reserve.sequence.age_ms
        assert command.sequence == reserve.sequence
        assert (command.attempt_id, command.cost_tokens) == (reserve.attempt_id, 20)
        target = command.target
        assert (target.lease_id, target.worker) == (b"L" * 16, "decode-0")
        assert target.incarnation == decode.identity.incarnation
        prefill.first_token(command, 70)
        await until(lambda: run.received() == [70])
        decode.committed(command.attempt_id)
        prefill.ended(command.attempt_id, committed=True)
        decode.tokens(command.attempt_id, 0, 70)
        decode.tokens(command.attempt_id, 1, 71)
        decode.tokens(command.attempt_id, 2, 72, end=True)
        assert await run.answer() == [70, 71, 72]
        assert run.generation.finish_reason == LENGTH
        assert stage.held() == NOTHING
        # Both workers have ended the attempt themselves; there is nothing to cancel.
        assert prefill.commands.empty()
        assert decode.commands.empty()


async def test_no_reservation_no_prefill() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        stage.generate()
        await decode.command("reserve")
        await asyncio.sleep(0.02)  # an early command would have arrived by then
        assert prefill.commands.empty()


async def test_a_first_token_that_ends_the_request_releases_the_lease() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=1)
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70, end=True)
        prefill.ended(command.attempt_id, finished=True)
        assert await run.answer() == [70]
        assert (await decode.command("release")).attempt_id == command.attempt_id
        assert stage.held() == NOTHING


async def test_a_first_token_lost_on_its_way_is_repeated_by_the_decode_worker() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=2)
        command = await to_prefill(prefill, decode)
        decode.committed(command.attempt_id)
        decode.tokens(command.attempt_id, 0, 70)
        stage.kill("prefill-0")
        decode.tokens(command.attempt_id, 1, 71, end=True)
        assert await run.answer() == [70, 71]


async def test_duplicate_and_overlapping_events_add_nothing() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=5)
        attempt_id = await to_decode(prefill, decode)
        decode.tokens(attempt_id, 1, 71, 72)
        decode.tokens(attempt_id, 1, 71, 72)
        decode.tokens(attempt_id, 0, 70, 71)
        decode.tokens(attempt_id, 2, 72, 73)
        decode.tokens(attempt_id, 4, 74, end=True)
        assert await run.answer() == [70, 71, 72, 73, 74]


async def test_logprobs_stay_with_their_tokens_when_events_overlap() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=3, logprobs=True)
        command = await to_prefill(prefill, decode)
        for start, token_ids, logprobs in [(0, [70], [-0.5]), (0, [70, 71], [-0.5, -1.5]), (2, [72], [-2.5])]:
            event = decode.token(command.attempt_id, start, *token_ids, end=start == 2)
            event.logprobs.extend(logprobs)
            decode.send(step={"tokens": [event], "num_free_blocks": 64})
        prefill.ended(command.attempt_id, committed=True)
        assert await run.answer() == [70, 71, 72]
        assert run.stream._waiting.logprobs == [-0.5, -1.5, -2.5]


async def test_a_gap_is_a_defect_of_ours() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate()
        attempt_id = await to_decode(prefill, decode)
        decode.tokens(attempt_id, 2, 72)
        error = await failure(run)
        assert isinstance(error, InternalError)
        assert "token 1 is missing" in str(error)
        assert (await decode.command("release")).attempt_id == attempt_id
        assert stage.held() == NOTHING


async def test_late_events_of_an_earlier_attempt_are_dropped() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(max_tokens=3)
        old = await to_decode(prefill, decode)
        decode.send(failed={"attempt_id": old, "failure": to_failure(Unavailable("shrunk"))})
        new = await to_decode(prefill, decode, token_id=71)
        decode.tokens(old, 2, 99)
        decode.tokens(new, 2, 72, end=True)
        assert await run.answer() == [70, 71, 72]


async def test_a_refused_reservation_returns_the_credit_and_tries_again() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(num_prompt_tokens=20, max_tokens=1)
        await decode.refuse(to_failure(Overloaded("no blocks", retry_after_s=0.05)))
        await until(lambda: stage.held() == NOTHING)
        (link,) = stage.fleet.prefill_links()
        assert link.credit == 4096
        await decode.command("release")
        command = await to_prefill(prefill, decode)
        prefill.first_token(command, 70, end=True)
        prefill.ended(command.attempt_id, finished=True)
        assert await run.answer() == [70]
        # A refusal is not a failure.
        assert run.generation._timeline.num_attempts == 1


async def test_a_refusal_for_a_fault_of_the_request_reaches_the_client() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate()
        await decode.refuse(to_failure(InvalidRequest("too many", field="max_tokens")))
        error = await failure(run)
        assert isinstance(error, InvalidRequest)
        assert error.field == "max_tokens"
        assert prefill.commands.empty()
        assert stage.held() == NOTHING


async def test_a_reservation_without_an_answer_fails_the_attempt() -> None:
    async with staged(reserve_timeout_s=0.05, max_attempts=1) as stage:
        _, decode = await workers(stage)
        run = stage.generate()
        command = await decode.command("reserve")
        error = await failure(run)
        assert isinstance(error, Unavailable)
        assert "decode-0 did not answer" in str(error)
        assert (await decode.command("release")).attempt_id == command.attempt_id
        assert stage.held() == NOTHING


async def test_blocks_of_an_unanswered_reservation_wake_the_next_request() -> None:
    async with staged(reserve_timeout_s=0.1, max_attempts=1) as stage:
        prefill = await stage.prefill()
        decode = await stage.decode(num_blocks=2)
        first, second = stage.generate(max_tokens=1), stage.generate(max_tokens=1)
        silent = await decode.command("reserve")
        assert isinstance(await failure(first), Unavailable)
        await decode.command("release")
        command = await to_prefill(prefill, decode)
        assert command.attempt_id != silent.attempt_id
        prefill.first_token(command, 70, end=True)
        prefill.ended(command.attempt_id, finished=True)
        assert await second.answer() == [70]


@pytest.mark.parametrize("kind", [NonFiniteLogits, InvalidRequest, DeadlineExceeded])
async def test_an_error_of_the_request_itself_is_not_tried_again(kind: type) -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate()
        command = await to_prefill(prefill, decode)
        prefill.ended(command.attempt_id, failure=to_failure(kind("no")))
        assert type(await failure(run)) is kind
        assert (await decode.command("release")).attempt_id == command.attempt_id


async def test_a_failure_in_decode_reaches_the_client() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate()
        attempt_id = await to_decode(prefill, decode)
        decode.send(failed={"attempt_id": attempt_id, "failure": to_failure(NonFiniteLogits("NaN"))})
        assert isinstance(await failure(run), NonFiniteLogits)
        assert run.received() == [70]
        assert stage.held() == NOTHING


async def test_attempts_are_bounded() -> None:
    async with staged(max_attempts=3) as stage:
        prefill, decode = await workers(stage)
        run = stage.generate()
        for _ in range(3):
            command = await to_prefill(prefill, decode)
            prefill.ended(command.attempt_id, failure=to_failure(KvTransferFailed("stalled")))
            await decode.command("abort_if_uncommitted")
            decode.gone(command.attempt_id)
            await decode.command("release")
        assert isinstance(await failure(run), KvTransferFailed)
        assert stage.held() == NOTHING


async def test_the_deadline_ends_both_legs() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        run = stage.generate(timeout_s=0.2, max_tokens=9)
        reserve = await decode.grant()
        assert 0 < reserve.sequence.remaining_ms <= 200
        command = await prefill.command("prefill")
        prefill.first_token(command, 70)
        error = await failure(run)
        assert isinstance(error, DeadlineExceeded)
        assert "1 of at most 9 tokens" in str(error)
        assert (await prefill.command("cancel")).attempt_id == command.attempt_id
        assert (await decode.command("release")).attempt_id == command.attempt_id
        assert stage.held()["attempts"] == 0


async def test_the_deadline_holds_in_the_queue_too() -> None:
    async with staged() as stage:
        await stage.prefill()
        await stage.decode(num_blocks=2)
        blocker, late = stage.generate(max_tokens=10), stage.generate(max_tokens=10, timeout_s=0.05)
        assert isinstance(await failure(late), DeadlineExceeded)
        assert len(stage.queue) == 0
        assert not blocker.task.done()


@pytest.mark.parametrize("stop_at", ["queued", "reserving", "prefilling", "transferring", "decoding"])
async def test_a_cancel_at_any_stage_leaves_nothing(stop_at: str) -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        attempt_id = b""
        if stop_at == "queued":
            (link,) = stage.fleet.prefill_links()
            link.credit = 0
        run = stage.generate()
        await asyncio.sleep(0)
        if stop_at == "reserving":
            attempt_id = (await decode.command("reserve")).attempt_id
        elif stop_at != "queued":
            command = await to_prefill(prefill, decode)
            attempt_id = command.attempt_id
        if stop_at == "transferring":
            prefill.first_token(command, 70)
            await until(lambda: run.received() == [70])
        if stop_at == "decoding":
            prefill.first_token(command, 70)
            decode.committed(attempt_id)
            prefill.ended(attempt_id, committed=True)
            decode.tokens(attempt_id, 1, 71)
            await until(lambda: run.received() == [70, 71])
        run.task.cancel()
        await asyncio.wait([run.task])
        assert run.task.cancelled()
        if stop_at != "queued":
            assert (await decode.command("release")).attempt_id == attempt_id
        if stop_at in ("prefilling", "transferring"):
            assert (await prefill.command("cancel")).attempt_id == attempt_id
        if stop_at == "prefilling":
            # The worker's answer settles the credit, although nobody listens any more.
            prefill.ended(attempt_id, cancelled=True)
        await until(lambda: stage.held() == NOTHING)
        assert prefill.commands.empty()
        assert decode.commands.empty()


async def test_the_heartbeat_renews_exactly_the_attempts_in_flight() -> None:
    async with staged() as stage:
        prefill, decode = await workers(stage)
        (link,) = stage.fleet.decode_links()
        stage.generate()
        attempt_id = await to_decode(prefill, decode)
        assert list(link._heartbeat_message().heartbeat.attempt_ids) == [attempt_id]
        decode.tokens(attempt_id, 1, 71, 72, 73, end=True)
        await until(lambda: stage.held() == NOTHING)
        assert list(link._heartbeat_message().heartbeat.attempt_ids) == []


async def test_what_no_worker_can_hold_is_refused_before_it_waits() -> None:
    async with staged() as stage:
        await stage.prefill()
        await stage.decode(num_blocks=4)
        run = stage.generate(num_prompt_tokens=60, max_tokens=6)
        error = await failure(run)
        assert isinstance(error, InvalidRequest)
        assert "room for 65 tokens" in str(error)
        assert error.field == "max_tokens"
        assert len(stage.queue) == 0


async def test_a_full_queue_refuses_at_once() -> None:
    async with staged(max_queue=1) as stage:
        await stage.prefill(budget=20)
        await stage.decode()
        runs = [stage.generate() for _ in range(3)]
        error = await failure(runs[2])
        assert isinstance(error, Overloaded)
        assert error.retry_after_s is not None
        assert 0 < error.retry_after_s <= 10
        assert not runs[0].task.done()
        assert not runs[1].task.done()


async def test_a_worker_that_does_not_keep_up_is_not_placed_on_again() -> None:
    async with staged(max_attempts=2) as stage:
        await stage.prefill()
        await stage.decode("decode-0", num_blocks=64)
        second = await stage.decode("decode-1", num_blocks=32)
        (link,) = (link for link in stage.fleet.decode_links() if link.name == "decode-0")
        session = link._session

        def overflow(message: Any) -> None:
            raise PeerLost("decode-0 does not read")

        session.send = overflow
        run = stage.generate()
        # Both attempts are made before the link's own reader has noticed anything.
        await second.command("reserve")
        assert link.state == "lost"
        assert not run.task.done()


async def test_the_stream_ends_with_the_generation_however_it_ends() -> None:
    async with staged() as stage:
        run = stage.generate()
        assert isinstance(await failure(run), Unavailable)
        assert await run.stream.next() is None
