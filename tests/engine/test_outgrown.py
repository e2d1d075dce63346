"""Requests that become too long for their scale step: they leave, and no token shows it.

The tattle-tale's KV hangs on the step, so a block of another step changes the next token.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.batch_builder import Chunk, build_batch
from engine.events import Preempted
from engine.request import Request, RequestStatus
from tests.engine.test_preemption import Engine
from tests.engine.tiny_models import make_request

STEPS = (16, 32, 64, 512)


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(7 * index + 11 * number) % 90 + 2 for index in range(length)]


def handed_over(engine: Engine, request: Request) -> Request:
    """The request as a decode worker gets it: a prefill-only engine's blocks, and the first token."""
    engine.run()
    assert request.status is RequestStatus.TRANSFERRING
    request.prefill_only = False
    request.move_to(RequestStatus.DECODING)
    engine.scheduler.add(request)
    return request


def test_a_request_that_outgrows_its_step_leaves_without_its_blocks() -> None:
    engine = Engine(40, rope_steps=STEPS)
    request = engine.add(0, prompt_of(15), 8)
    batch = engine.scheduler.next_batch()
    assert batch is not None
    engine.scheduler.apply(engine._runner.run(batch))
    # Sixteen tokens are still the first step's.
    assert (request.num_tokens, request.status) == (16, RequestStatus.DECODING)
    batch = engine.scheduler.next_batch()
    assert batch is not None
    assert engine.scheduler.take_left() == []
    engine.scheduler.apply(engine._runner.run(batch))
    tokens = list(request.token_ids)

    assert engine.scheduler.next_batch() is None
    assert engine.scheduler.take_left() == [Preempted(request, outgrown=True)]
    assert (request.status, request.num_computed_tokens, request.block_ids) == (RequestStatus.QUEUED, 0, [])
    assert (request.token_ids, request.num_prompt_tokens) == (tokens, 15)
    assert (engine.pool.num_used, engine.scheduler.has_work) == (0, False)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 60, 64, 65])
def test_every_token_is_the_one_of_a_fresh_computation(length: int) -> None:
    engine = Engine(64, rope_steps=STEPS)
    request = engine.add(0, prompt_of(length), 60)
    engine.run()
    assert engine.answer(request) == engine.expected(prompt_of(length), 60)
    # Prompt and answer but the last token, which nothing is computed after.
    borders = [step for step in STEPS if length <= step < length + 59]
    assert engine.num_outgrown[request.attempt_id] == len(borders)
    assert not engine.num_preempted


def test_a_model_with_one_scale_has_its_answers_uninterrupted() -> None:
    engine = Engine(64)
    request = engine.add(0, prompt_of(10), 60)
    engine.run()
    assert not engine.num_outgrown
    assert engine.answer(request) == engine.expected(prompt_of(10), 60)


def test_an_old_and_a_young_request_outgrow_alike() -> None:
    engine = Engine(64, rope_steps=STEPS)
    requests = [engine.add(number, prompt_of(12 + number, number), 30) for number in range(4)]
    engine.run()
    for number, request in enumerate(requests):
        assert engine.answer(request) == engine.expected(prompt_of(12 + number, number), 30)
        assert engine.num_outgrown[request.attempt_id] == 2


def test_requests_in_steps_of_their_own_outgrow_too() -> None:
    engine = Engine(64, rope_steps=STEPS)
    alone = engine.add(0, prompt_of(14), 30, alone=True)
    other = engine.add(1, prompt_of(20, 1), 30)
    engine.run()
    assert engine.answer(alone) == engine.expected(prompt_of(14), 30)
    assert engine.answer(other) == engine.expected(prompt_of(20, 1), 30)


def test_cached_blocks_of_another_step_are_not_found() -> None:
    engine = Engine(64, rope_steps=STEPS)
    long, short = prompt_of(40), prompt_of(40)[:24]
    engine.add(0, long, 1)
    engine.run()
    at_another = engine.add(1, short, 4)
    at_the_same = engine.add(2, [*long, 5], 4)
    engine.run()
    assert (at_another.num_cached_tokens, at_the_same.num_cached_tokens) == (0, 40)
    assert engine.answer(at_another) == engine.expected(short, 4)
    assert engine.answer(at_the_same) == engine.expected([*long, 5], 4)


def test_a_request_that_resumes_finds_what_others_computed_at_its_new_step() -> None:
    engine = Engine(64, rope_steps=STEPS)
    prompt = prompt_of(16)
    longer = prompt + engine.expected(prompt, 10)
    engine.add(0, longer, 1)
    engine.run()
    request = engine.add(1, prompt, 8)
    engine.run()
    assert (request.rope_step, request.num_cached_tokens) == (1, 16)
    assert engine.answer(request) == longer[16:24]


def test_a_prompt_as_long_as_a_step_is_sampled_there_and_goes_on_at_the_next() -> None:
    engine = Engine(64, rope_steps=STEPS)
    prompt = prompt_of(32)
    request = handed_over(engine, engine.add(0, prompt, 6, prefill_only=True))
    assert (request.num_tokens, request.rope_step) == (33, 1)
    engine.run()
    assert (engine.num_outgrown[request.attempt_id], request.rope_step) == (1, 2)
    assert engine.answer(request) == engine.expected(prompt, 6)


def test_what_a_lease_brought_stays_findable_at_its_step() -> None:
    engine = Engine(64, rope_steps=STEPS)
    prompt = prompt_of(16)
    request = engine.add(0, prompt, 6, prefill_only=True)
    engine.run()
    engine.pool.unpublish(request.block_ids)
    request.num_published_blocks = 0
    handed_over(engine, request)
    engine.run()
    sibling = engine.add(1, prompt, 6, sample_index=1)
    engine.step()
    assert sibling.num_cached_tokens == 12


def test_a_prompt_at_the_step_of_another_length_is_refused() -> None:
    engine = Engine(64, rope_steps=STEPS)
    for length, step in ((16, 1), (17, 0), (33, 1)):
        request = make_request(prompt_of(length), rope_step=step)
        with pytest.raises(ValueError, match=f"{length} tokens cannot be computed at step {step}"):
            engine.scheduler.add(request)


def test_another_step_needs_other_keys() -> None:
    request = make_request(prompt_of(20))
    keys: Any = object()
    request.prefix_keys = keys
    request.scale_to(0)
    assert request.prefix_keys is keys
    request.scale_to(2)
    assert (request.rope_step, request.prefix_keys) == (2, None)


def test_a_batch_says_the_step_of_each_token() -> None:
    short = make_request([1, 2, 3], block_ids=[0, 1])
    long = make_request([4, 5, 6, 7], number=1, block_ids=[2, 3], num_computed_tokens=2, rope_step=2)
    mixed = build_batch(1, [Chunk.of(short, 3), Chunk.of(long, 2)], 2)
    assert mixed.rope_steps is not None
    assert mixed.rope_steps.tolist() == [0, 0, 0, 2, 2]
    assert build_batch(1, [Chunk.of(short, 3)], 2).rope_steps is None
