"""The rule by which a request meets its objectives, and goodput from a table of attainment."""

from __future__ import annotations

import math

import pytest

from baton.bench.outcome import Outcome
from benchmarks.attainment import Objectives, Window, goodput, pooled

RULE = Objectives(ttft_base_s=0.5, ttft_per_token_s=0.003, mean_itl_s=0.150)


def outcome(*token_s: float, prompt: int = 100, failure: str = "", max_tokens: int | None = None) -> Outcome:
    count = len(token_s) if max_tokens is None else max_tokens
    return Outcome(num_prompt_tokens=prompt, max_tokens=count, token_s=token_s, failure=failure)


def window(*outcomes: Outcome, rate: float = 1.0) -> Window:
    return Window(side="ours", rate=rate, round_number=1, outcomes=outcomes, objectives=RULE)


GOOD = outcome(0.1, 0.2)
BAD = outcome(9.0, 9.1)


@pytest.mark.parametrize(
    ("found", "is_met"),
    [
        # 100 tokens are allowed 0.5 + 0.3 s.
        (outcome(0.8, 0.9), True),
        (outcome(0.801, 0.9), False),
        # 1,000 tokens are allowed 3.5 s.
        (outcome(3.5, 3.6, prompt=1000), True),
        # The mean counts, not the worst: 0.28 and 0.01.
        (outcome(0.1, 0.38, 0.39), True),
        (outcome(0.1, 0.3, 0.41), False),
        # One token has no gap.
        (outcome(0.2), True),
        (outcome(0.2, 0.3, max_tokens=3), False),
        (outcome(0.2, 0.3, failure="UNAVAILABLE"), False),
        (outcome(failure="OVERLOADED", max_tokens=2), False),
    ],
    ids=["just", "late", "long", "stall", "slow", "one", "cut-off", "failed", "refused"],
)
def test_a_request_meets_both_objectives_or_counts_as_missing(found: Outcome, is_met: bool) -> None:
    assert (RULE.strain(found) <= 1) is is_met
    assert window(found).num_met == is_met


def test_strain_is_the_worse_of_both() -> None:
    assert RULE.strain(outcome(0.4, 0.43)) == pytest.approx(0.5)
    assert RULE.strain(outcome(0.4, 0.7)) == pytest.approx(2.0)
    assert RULE.strain(outcome(0.4, 0.7, failure="DEADLINE")) == math.inf


@pytest.mark.parametrize(("num_good", "num_bad"), [(9, 1), (18, 2), (63, 7), (7, 0), (8, 1), (26, 3), (0, 4)])
def test_a_window_is_attained_from_nine_tenths_on(num_good: int, num_bad: int) -> None:
    measured = window(*[GOOD] * num_good, *[BAD] * num_bad)

    assert measured.attainment == num_good / (num_good + num_bad)
    assert measured.is_attained is (10 * num_good >= 9 * (num_good + num_bad))


def test_a_window_without_requests_shows_nothing() -> None:
    assert not window().is_attained


def test_what_got_no_token_waited_to_its_deadline() -> None:
    measured = window(
        outcome(0.1, 0.15, 0.15, 0.4),
        outcome(0.3, 0.35, prompt=1500),
        outcome(failure="DEADLINE", max_tokens=2),
    )

    assert measured.ttft_ms(50) == pytest.approx(300)
    # One of 100 ms, and one that failed: nine tenths of the way to its deadline of 20 s.
    assert measured.ttft_ms(90, longest=127) == pytest.approx(100 + 0.9 * 19_900)
    assert measured.ttft_ms(90, shortest=513) == pytest.approx(300)
    assert measured.ttft_ms(90, longest=512, shortest=128) is None
    # Gaps of 50, 0, 250 and 50 ms.
    assert measured.itl_ms(100) == pytest.approx(250)
    assert measured.itl_ms(50) == pytest.approx(50)


def test_the_record_counts_failures_by_reason() -> None:
    facts = window(GOOD, outcome(failure="DEADLINE", max_tokens=2), outcome(0.2, failure="DEADLINE")).facts()

    assert facts["failures"] == {"DEADLINE": 2}
    assert (facts["requests"], facts["met"], facts["strain"]) == (3, 1, None)


def test_goodput_is_the_highest_rate_up_to_which_all_attain() -> None:
    assert goodput({0.4: 1.0, 0.8: 0.9, 1.6: 0.85}) == 0.8
    assert goodput({1.6: 0.2, 0.4: 1.0}) == 0.4
    assert goodput({0.4: 0.89}) == 0.0
    # What attains above a failure is chance.
    assert goodput({0.4: 0.95, 0.8: 0.7, 1.0: 0.95}) == 0.4
    assert goodput({}) == 0.0
    assert goodput({0.4: 0.6, 0.8: 0.4}, share=0.5) == 0.4


def test_windows_of_one_rate_are_pooled_by_their_requests() -> None:
    table = pooled([window(GOOD, GOOD, GOOD), window(BAD), window(GOOD, BAD, rate=2.0)])

    assert table == {1.0: 0.75, 2.0: 0.5}
