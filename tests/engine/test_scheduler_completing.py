"""Which requests the scheduler names as those whose prompt the step in flight completes."""

from __future__ import annotations

import pytest

from tests.engine.test_scheduler import Engine, lengths_of, output_of


def test_a_chunked_prompt_completes_with_its_last_chunk() -> None:
    engine = Engine()
    request = engine.add(1, 40, prefill_only=True)
    completing = []
    for _ in range(3):
        batch = engine.scheduler.next_batch()
        assert batch is not None
        completing.append(engine.scheduler.completing)
        engine.scheduler.apply(output_of(batch, [1] * len(batch.logits_rows)))
    # 40 tokens in chunks of 16.
    assert completing == [[], [], [request]]


def test_nothing_completes_without_a_step_in_flight() -> None:
    engine = Engine()
    engine.add(1, 5, prefill_only=True)
    assert engine.scheduler.completing == []
    engine.step()
    assert engine.scheduler.completing == []


def test_of_packed_prompts_those_that_end_are_named() -> None:
    engine = Engine()
    long, first, second = (engine.add(n, size, prefill_only=True) for n, size in ((1, 30), (2, 7), (3, 16)))
    assert lengths_of(engine.scheduler.next_batch()) == [7, 16, 16]
    assert engine.scheduler.completing == [first, second]
    assert long.num_pending_tokens == 30


def test_decoding_requests_and_prompts_that_stay_here_are_not_named() -> None:
    engine = Engine()
    engine.add_decoding(1, 9)
    engine.add(2, 6)
    leaves = engine.add(3, 8, prefill_only=True)
    assert lengths_of(engine.scheduler.next_batch()) == [1, 6, 8]
    assert engine.scheduler.completing == [leaves]


def test_a_resumed_prompt_completes_with_the_answer_it_brings() -> None:
    engine = Engine()
    request = engine.add(1, 20, prefill_only=True, num_prompt_tokens=12)
    engine.step()
    engine.scheduler.next_batch()
    assert engine.scheduler.completing == [request]


def test_what_the_prefix_cache_has_counts_as_computed() -> None:
    engine = Engine()
    first = engine.add(1, 30, prefill_only=True)
    engine.step()
    engine.step()
    engine.pool.release(first.block_ids)
    again = engine.add(1, 30, prefill_only=True)
    # 28 of the 30 tokens are in full blocks of 4.
    assert lengths_of(engine.scheduler.next_batch()) == [2]
    assert engine.scheduler.completing == [again]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_request_that_was_removed_during_the_step_is_not_named(comes_back: bool) -> None:
    engine = Engine()
    removed, stays = engine.add(1, 5, prefill_only=True), engine.add(2, 5, prefill_only=True)
    engine.scheduler.next_batch()
    engine.scheduler.remove(removed.attempt_id)
    if comes_back:
        engine.add(1, 5, prefill_only=True)
    assert engine.scheduler.completing == [stays]


def test_an_alone_request_is_named_too() -> None:
    engine = Engine()
    request = engine.add(1, 5, prefill_only=True, alone=True)
    engine.scheduler.next_batch()
    assert engine.scheduler.completing == [request]
