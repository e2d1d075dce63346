"""What a step was, and whose time it took, against sums done by hand."""

from __future__ import annotations

import pytest

from engine.batch_builder import Chunk
from engine.request import Request, RequestStatus
from engine.step_meter import StepLoad, StepMeter
from tests.engine.tiny_models import make_request


def prompt(number: int, num_tokens: int, **fields: object) -> Request:
    return make_request(range(num_tokens), number=number, status=RequestStatus.PREFILLING, **fields)


def decoding(number: int, num_tokens: int) -> Request:
    return make_request(
        range(num_tokens),
        number=number,
        status=RequestStatus.DECODING,
        num_computed_tokens=num_tokens - 1,
    )


def test_prompts_share_a_step_by_tokens_with_those_that_decode_in_it() -> None:
    meter, long, short = StepMeter(), prompt(1, 50), prompt(2, 5)
    chunks = [Chunk.of(decoding(3, 9), 1), Chunk.of(decoding(4, 30), 1), Chunk.of(long, 13)]
    meter.begin([*chunks, Chunk.of(short, 5)], 100.0)
    load = meter.end(100.4)

    assert load.duration_s == pytest.approx(0.4)
    # Each attends to the tokens in its cache, its own included.
    assert (load.num_decoding, load.num_context_tokens, load.num_prompt_tokens) == (2, 39, 18)
    # 20 tokens in all: 20 ms each.
    assert (long.times.compute_s, short.times.compute_s) == pytest.approx((0.26, 0.1))
    assert (long.times.num_tokens, short.times.num_tokens) == (13, 5)


def test_a_prompt_adds_its_steps_up_and_begins_with_the_first() -> None:
    meter, request = StepMeter(), prompt(1, 50)
    for began_at, duration_s, num_tokens in ((10.0, 0.1, 16), (11.0, 0.3, 16)):
        meter.begin([Chunk.of(request, num_tokens)], began_at)
        meter.end(began_at + duration_s)
    times = request.times
    assert (times.began_at, times.num_steps, times.num_tokens) == (10.0, 2, 32)
    assert times.compute_s == pytest.approx(0.4)


def test_only_decoding_requests_leave_no_prompt_tokens() -> None:
    meter = StepMeter()
    meter.begin([Chunk.of(decoding(1, 4), 1)], 1.0)
    assert meter.end(1.5) == StepLoad(
        duration_s=0.5, num_decoding=1, num_context_tokens=4, num_prompt_tokens=0
    )


def test_a_request_that_changes_during_the_step_is_counted_as_it_was() -> None:
    meter, request = StepMeter(), prompt(1, 8)
    meter.begin([Chunk.of(request, 8)], 1.0)
    request.move_to(RequestStatus.FINISHED)
    request.token_ids.clear()
    assert meter.end(2.0).num_prompt_tokens == 8
    assert request.times.num_steps == 1


def test_who_waits_for_blocks_again_has_its_times_forgotten() -> None:
    meter, request = StepMeter(), prompt(1, 8)
    meter.begin([Chunk.of(request, 4)], 1.0)
    meter.end(2.0)
    request.rewind()
    assert (request.times.began_at, request.times.num_steps, request.times.compute_s) == (None, 0, 0.0)
