"""When things happened to an answer: the summary for the client, and the whole way for who asks why."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.answer import Timings, TransferTimes
from baton.errors import Overloaded
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from router.placing.places import Candidate, Decision
from router.timeline import MAX_ATTEMPTS, Timeline

PARTS = {
    "open_ms": 1.0,
    "wait_ms": 2.0,
    "prepare_ms": 4.0,
    "wire_ms": 8.0,
    "verify_ms": 16.0,
    "convert_ms": 32.0,
    "commit_ms": 64.0,
}


class Clock:
    """The loop's time as the test sets it, in milliseconds since the request came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self.arrived_at = 1000.0
        self._now = self.arrived_at
        monkeypatch.setattr(self._loop, "time", lambda: self._now)

    def __call__(self, at_ms: float) -> None:
        self._now = self.arrived_at + at_ms / 1000


@pytest.fixture
async def clock() -> Any:
    # A patched clock must not outlive the test: the loop goes by it.
    with pytest.MonkeyPatch.context() as patch:
        yield Clock(patch)


def candidate(prefill: str, decode: str, *, wait_ms: float = 0.0, prefill_ms: float = 0.0) -> Any:
    """A place; prefill "" for a decode worker that computes the prompt itself."""
    return Candidate(
        prefill=SimpleNamespace(name=prefill) if prefill else None,  # type: ignore[arg-type]
        decode=SimpleNamespace(name=decode),  # type: ignore[arg-type]
        num_cached_tokens=32,
        num_held_tokens=16,
        wait_ms=wait_ms,
        prefill_ms=prefill_ms,
        transfer_ms=3.0,
        itl_ms=20.0,
        score_ms=wait_ms + prefill_ms + 23.0,
    )


def decision(*candidates: Any, excluded: tuple[tuple[str, str], ...] = ()) -> Any:
    return Decision(
        chosen=candidates[0], others=candidates[1:], excluded=excluded, num_candidates=len(candidates)
    )


async def test_the_parts_of_the_transfer_are_those_of_the_last_attempt() -> None:
    timeline = Timeline(0.0)
    timeline.dispatched("prefill-0", "decode-0")
    timeline.prefill_ended(prefill_service_pb2.PrefillEnded(transfer_times={"open_ms": 9.0, "wait_ms": 9.0}))
    timeline.dispatched("prefill-1", "decode-1")
    timeline.prefill_ended(
        prefill_service_pb2.PrefillEnded(
            committed=True,
            transfer_ms=90.0,
            transfer_times=common_pb2.TransferTimes(**PARTS),
            transfer_hidden_share=0.75,
        )
    )
    timings = Timings.from_proto(timeline.timings())
    assert timings.transfer_times == TransferTimes(**PARTS)
    assert (timings.transfer_ms, timings.transfer_hidden_share) == (90.0, 0.75)
    assert (timings.prefill_worker, timings.decode_worker) == ("prefill-1", "decode-1")


async def test_the_parts_of_the_first_token_stay_those_of_its_attempt(clock: Clock) -> None:
    timeline = Timeline(clock.arrived_at)
    # The second attempt gives the first token; the prefill worker of the last computes more, and finds less.
    for number, num_cached, computing_ms in ((1, 8, 40.0), (2, 16, 50.0), (3, 0, 300.0)):
        clock(1000.0 * number)
        timeline.attempt_begins()
        clock(1000.0 * number + 5 * number)
        timeline.dispatched(f"prefill-{number}", f"decode-{number}")
        clock(1000.0 * number + 7 * number)
        timeline.reserved()
        if number > 1:
            timeline.tokens_arrived(1)
        times = {"num_cached_tokens": num_cached, "total_ms": computing_ms}
        timeline.prefill_ended(prefill_service_pb2.PrefillEnded(prefill=times, transfer_bytes=number))
        timeline.attempt_ended("OUTGROWN" if number == 2 else "OK")
        if number == 2:
            timeline.gave_way(is_outgrown=True)
    timings = Timings.from_proto(timeline.timings())
    assert (timings.prefill_worker, timings.prefill_ms) == ("prefill-2", 50.0)
    assert (timings.queue_ms, timings.reserve_ms) == pytest.approx((2010.0, 4.0))
    assert timeline.num_cached_tokens == 16
    # And these are the last one's.
    assert (timings.decode_worker, timings.transfer_bytes) == ("decode-3", 3)
    assert (timings.num_outgrown, timings.num_preemptions) == (1, 0)
    assert [attempt.prefill.num_cached_tokens for attempt in timeline.report().attempts] == [8, 16, 0]


async def test_without_a_transfer_its_parts_took_no_time() -> None:
    timeline = Timeline(0.0)
    timeline.prefill_ended(prefill_service_pb2.PrefillEnded(finished=True))
    timings = Timings.from_proto(timeline.timings())
    assert timings.transfer_times == TransferTimes(**dict.fromkeys(PARTS, 0.0))
    assert timings.transfer_hidden_share == 0.0


async def test_every_stamp_of_an_attempt_counts_from_the_requests_arrival(clock: Clock) -> None:
    timeline = Timeline(clock.arrived_at)
    clock(1.0)
    timeline.attempt_begins()
    timeline.queued("<128", 90, 200)
    clock(11.0)
    timeline.dispatched("prefill-0", "decode-0")
    clock(14.0)
    timeline.reserved()
    clock(64.0)
    timeline.tokens_arrived(1)
    clock(70.0)
    timeline.committed()
    clock(90.0)
    timeline.tokens_arrived(1)
    clock(110.0)
    timeline.tokens_arrived(2)
    timeline.attempt_ended("OK")
    clock(112.0)
    timeline.ended(None)
    explain = timeline.report()
    (attempt,) = explain.attempts
    at_ms = [
        attempt.queued_at_ms,
        attempt.placed_at_ms,
        attempt.reserved_at_ms,
        attempt.first_token_at_ms,
        attempt.committed_at_ms,
        attempt.decoding_at_ms,
        attempt.ended_at_ms,
        explain.ended_at_ms,
    ]
    assert at_ms == pytest.approx([1, 11, 14, 64, 70, 90, 110, 112])
    assert (attempt.number, attempt.outcome, explain.outcome) == (1, "OK", "OK")
    assert (explain.bucket, explain.num_uncached_tokens, explain.expected_output_tokens) == ("<128", 90, 200)
    timings = timeline.timings()
    assert (timings.queue_ms, timings.reserve_ms) == pytest.approx((11.0, 3.0))
    assert (timings.ttft_ms, timings.total_ms) == pytest.approx((64.0, 110.0))
    # Four tokens in 46 ms: three gaps.
    assert timings.itl_ms == pytest.approx(46 / 3)
    assert timeline.num_tokens == 4


async def test_a_second_attempt_has_stamps_of_its_own_and_leaves_the_first_token_where_it_was(
    clock: Clock,
) -> None:
    timeline = Timeline(clock.arrived_at)
    timeline.attempt_begins()
    clock(10.0)
    timeline.dispatched("prefill-0", "decode-0")
    clock(50.0)
    timeline.tokens_arrived(1)
    clock(60.0)
    timeline.attempt_ended("PEER_LOST", "decode-0 was lost")
    clock(80.0)
    timeline.attempt_begins()
    clock(85.0)
    timeline.dispatched("decode-1", "decode-1")
    clock(95.0)
    timeline.tokens_arrived(1)
    timeline.attempt_ended("OK")
    timeline.ended(None)
    first, second = timeline.report().attempts
    assert (first.outcome, first.reason, first.number) == ("PEER_LOST", "decode-0 was lost", 1)
    assert (second.number, second.queued_at_ms, second.placed_at_ms) == (
        2,
        pytest.approx(80),
        pytest.approx(85),
    )
    assert second.first_token_at_ms == pytest.approx(95)
    assert timeline.explain.first_token_at_ms == pytest.approx(50)
    # The queue's share of a TTFT that is over is the first attempt's.
    assert timeline.timings().queue_ms == pytest.approx(10)


async def test_an_attempt_that_got_no_worker_has_no_stamp_of_one(clock: Clock) -> None:
    timeline = Timeline(clock.arrived_at)
    timeline.attempt_begins()
    clock(5.0)
    timeline.attempt_ended("OVERLOADED", "full")
    timeline.ended(Overloaded("full"))
    (attempt,) = timeline.report().attempts
    assert not any(
        attempt.HasField(field)  # type: ignore[arg-type]
        for field in ("placed_at_ms", "reserved_at_ms", "first_token_at_ms", "committed_at_ms")
    )
    assert timeline.explain.outcome == "OVERLOADED"
    assert not timeline.was_dispatched


async def test_of_very_many_attempts_the_last_are_kept_with_their_numbers() -> None:
    timeline = Timeline(0.0)
    for _ in range(MAX_ATTEMPTS + 8):
        timeline.attempt_begins()
        timeline.attempt_ended("PEER_LOST")
    numbers = [attempt.number for attempt in timeline.report().attempts]
    assert numbers == list(range(9, MAX_ATTEMPTS + 9))


async def test_places_are_told_the_chosen_one_first_and_why_others_could_not_be(clock: Clock) -> None:
    timeline = Timeline(clock.arrived_at)
    timeline.attempt_begins()
    chosen, other = (
        candidate("prefill-0", "decode-0", wait_ms=5.0, prefill_ms=40.0),
        candidate("", "decode-1"),
    )
    timeline.decided(decision(chosen, other, excluded=(("decode-2", "has 0 free blocks, 3 are needed"),)))
    (attempt,) = timeline.report().attempts
    first, second, third = attempt.candidates
    assert (first.prefill_worker, first.decode_worker, first.chosen) == ("prefill-0", "decode-0", True)
    assert (first.wait_ms, first.prefill_ms, first.transfer_ms, first.itl_ms) == (5.0, 40.0, 3.0, 20.0)
    assert (first.num_cached_tokens, first.num_held_tokens) == (32, 16)
    # Who computes the prompt where there is no prefill worker.
    assert (second.prefill_worker, second.decode_worker, second.chosen) == ("decode-1", "decode-1", False)
    assert third.excluded == "has 0 free blocks, 3 are needed"
    assert not third.chosen
    assert attempt.num_candidates == 2


@pytest.mark.parametrize(
    ("first_token_at_ms", "others_ms", "regret_ms"),
    [
        # Placed at 20: 80 ms to the first token; the best other place was predicted to take 50.
        pytest.param(100.0, [(0.0, 70.0), (10.0, 40.0)], 30.0, id="another was sooner"),
        pytest.param(60.0, [(0.0, 70.0)], 0.0, id="no other was sooner"),
        pytest.param(100.0, [], 0.0, id="no other"),
    ],
)
async def test_regret_is_the_time_that_the_best_other_place_would_have_saved(
    clock: Clock, first_token_at_ms: float, others_ms: list[tuple[float, float]], regret_ms: float
) -> None:
    timeline = Timeline(clock.arrived_at)
    timeline.attempt_begins()
    clock(20.0)
    timeline.dispatched("p", "d")
    others = [candidate("p", "e", wait_ms=wait, prefill_ms=prefill) for wait, prefill in others_ms]
    timeline.decided(decision(candidate("p", "d", prefill_ms=1.0), *others))
    clock(first_token_at_ms)
    timeline.tokens_arrived(1)
    assert timeline.regretted == ("remote" if others_ms else "")
    assert timeline.report().regret_ms == pytest.approx(regret_ms)
    # Later tokens change nothing of it.
    clock(9000.0)
    timeline.tokens_arrived(1)
    assert timeline.report().regret_ms == pytest.approx(regret_ms)


async def test_a_report_of_one_in_flight_ends_now_and_of_one_that_is_over_when_it_ended(clock: Clock) -> None:
    timeline = Timeline(clock.arrived_at)
    timeline.attempt_begins()
    clock(30.0)
    explain = timeline.report()
    assert explain.reported_at_ms == pytest.approx(30)
    assert not explain.HasField("ended_at_ms")
    assert (explain.outcome, explain.attempts[0].outcome) == ("", "")
    clock(40.0)
    timeline.attempt_ended("CANCELLED")
    timeline.ended(asyncio.CancelledError())
    clock(500.0)
    explain = timeline.report()
    assert (explain.reported_at_ms, explain.ended_at_ms) == pytest.approx((40, 40))
    assert explain.outcome == "CANCELLED"


async def test_what_the_decode_worker_computed_itself_is_told_like_a_prefill_workers_part() -> None:
    timeline = Timeline(0.0)
    timeline.attempt_begins()
    timeline.dispatched("decode-0", "decode-0")
    times = common_pb2.PrefillTimes(total_ms=12.0, num_computed_tokens=20, num_cached_tokens=64)
    timeline.prompt_computed(decode_service_pb2.PromptComputed(prefill=times))
    assert timeline.report().attempts[0].prefill == times
    assert (timeline.num_cached_tokens, timeline.timings().prefill_ms) == (64, 12.0)
