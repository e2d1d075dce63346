"""What a router counts of its prompts at a prefill worker, held against a plain account of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from router.placing.prefill_backlog import PrefillBacklog

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def place(
    backlog: PrefillBacklog,
    attempt_id: bytes,
    num_tokens: int = 100,
    *,
    num_blocks: int = 7,
    predicted_ms: float = 50.0,
    now: float = 0.0,
) -> None:
    backlog.place(
        attempt_id, num_tokens=num_tokens, num_blocks=num_blocks, predicted_ms=predicted_ms, now=now
    )


def test_a_prompt_keeps_its_blocks_when_it_is_computed_and_its_tokens_do_not_wait_any_more() -> None:
    backlog = PrefillBacklog()
    place(backlog, A, 100, num_blocks=7)
    place(backlog, B, 30, num_blocks=2)
    assert (backlog.num_tokens, backlog.num_blocks) == (130, 9)
    backlog.computed(A, 1.0)
    assert (backlog.num_tokens, backlog.num_blocks) == (30, 9)
    backlog.ended(A)
    assert (backlog.num_tokens, backlog.num_blocks) == (30, 2)


def test_ends_that_come_twice_or_of_strangers_change_nothing() -> None:
    backlog = PrefillBacklog()
    place(backlog, A)
    for _ in range(2):
        backlog.computed(A, 1.0)
        backlog.ended(A)
        backlog.ended(B)
        backlog.computed(C, 1.0)
    assert (backlog.num_tokens, backlog.num_blocks) == (0, 0)


def test_a_prompt_that_ends_before_it_is_computed_leaves_nothing() -> None:
    backlog = PrefillBacklog()
    place(backlog, A)
    backlog.ended(A)
    assert (backlog.num_tokens, backlog.num_blocks) == (0, 0)
    assert backlog.work_ahead_ms(1000, 128, 1.0) == 0.0


def test_all_that_is_no_longer_goes_before_a_prompt_and_a_chunk_of_one_that_is() -> None:
    backlog = PrefillBacklog()
    place(backlog, A, 100, predicted_ms=50.0)
    place(backlog, B, 1000, predicted_ms=800.0)
    place(backlog, C, 300, predicted_ms=120.0)
    # Before 100 tokens: A, and 128 of B's 1000 tokens; of several longer ones only the oldest advances.
    assert backlog.work_ahead_ms(100, 128, 0.0) == pytest.approx(50.0 + 800.0 * 0.128)
    assert backlog.work_ahead_ms(99, 128, 0.0) == pytest.approx(50.0)
    assert backlog.work_ahead_ms(1000, 128, 0.0) == pytest.approx(970.0)


def test_a_longer_prompt_of_less_than_a_chunk_goes_before_as_a_whole() -> None:
    backlog = PrefillBacklog()
    place(backlog, A, 100, predicted_ms=50.0)
    assert backlog.work_ahead_ms(10, 128, 0.0) == pytest.approx(50.0)


def test_time_that_has_passed_is_work_that_is_done() -> None:
    backlog = PrefillBacklog()
    place(backlog, A, 100, predicted_ms=50.0, now=10.0)
    place(backlog, B, 100, predicted_ms=50.0, now=10.02)
    assert backlog.work_ahead_ms(100, 128, 10.03) == pytest.approx(70.0)
    # B's time begins when A is computed.
    backlog.computed(A, 10.06)
    assert backlog.work_ahead_ms(100, 128, 10.07) == pytest.approx(40.0)
    # A worker that takes longer than predicted is about to be done, not done before it began.
    assert backlog.work_ahead_ms(100, 128, 99.0) == 0.0


def test_a_prompt_that_goes_before_it_is_computed_is_no_work_done_for_others() -> None:
    backlog = PrefillBacklog()
    place(backlog, A, 100, predicted_ms=50.0, now=10.0)
    place(backlog, B, 100, predicted_ms=50.0, now=10.0)
    assert backlog.work_ahead_ms(100, 128, 10.02) == pytest.approx(80.0)
    backlog.ended(A)
    assert backlog.work_ahead_ms(100, 128, 10.02) == pytest.approx(30.0)


def test_idle_time_is_no_work_done() -> None:
    backlog = PrefillBacklog()
    place(backlog, A, now=0.0)
    backlog.ended(A)
    place(backlog, B, 100, predicted_ms=50.0, now=60.0)
    assert backlog.work_ahead_ms(100, 128, 60.0) == pytest.approx(50.0)


@dataclass
class Prompt:
    num_tokens: int
    num_blocks: int
    waits: bool = True


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_plain_account_and_zero_at_the_end(seed: int) -> None:
    rng, backlog, account = random.Random(seed), PrefillBacklog(), dict[bytes, Prompt]()
    for number in range(200):
        act = rng.random()
        known = rng.choice(list(account)) if account else b""
        if act < 0.5 or not known:
            prompt = Prompt(rng.randrange(1, 500), rng.randrange(1, 40))
            account[number.to_bytes(16)] = prompt
            place(backlog, number.to_bytes(16), prompt.num_tokens, num_blocks=prompt.num_blocks)
        elif act < 0.7:
            account[known].waits = False
            backlog.computed(known, float(number))
        else:
            del account[known]
            backlog.ended(known)
        assert backlog.num_tokens == sum(p.num_tokens for p in account.values() if p.waits)
        assert backlog.num_blocks == sum(p.num_blocks for p in account.values())
    for known in account:
        backlog.ended(known)
    assert (backlog.num_tokens, backlog.num_blocks) == (0, 0)
