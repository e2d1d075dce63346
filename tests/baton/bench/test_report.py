from __future__ import annotations

import pytest

from baton.bench.outcome import Outcome
from baton.bench.report import Report
from baton.bench.slo import Slo


def answered(*token_s: float, num_prompt_tokens: int = 10) -> Outcome:
    return Outcome(num_prompt_tokens=num_prompt_tokens, max_tokens=len(token_s), token_s=token_s)


def failed(code: str, detail: str = "", *token_s: float) -> Outcome:
    return Outcome(num_prompt_tokens=10, max_tokens=5, token_s=token_s, failure=code, detail=detail)


# Two tokens of one message: the first of them has the whole gap since the message before, the other none.
RUN = Report(
    outcomes=(
        answered(0.1, 0.3, 0.3),
        answered(0.2, 0.25, num_prompt_tokens=30),
        failed("OVERLOADED", "the queue is full"),
        failed("OVERLOADED", "still"),
        failed("UNAVAILABLE", "lost", 0.1, 0.2),
    ),
    duration_s=2.0,
    slo=Slo(ttft_ms=150.0),
)


def test_latencies_are_those_of_complete_requests() -> None:
    assert RUN.latencies("ttft_ms") == pytest.approx([100.0, 200.0])
    assert RUN.latencies("itl_ms") == pytest.approx([200.0, 0.0, 50.0])
    assert RUN.latencies("e2e_ms") == pytest.approx([300.0, 250.0])


def test_rates_are_over_the_whole_run() -> None:
    figures = RUN.as_dict()
    assert figures["requests_per_s"] == 1.0
    assert figures["input_tokens_per_s"] == 20.0
    # 3 + 2 tokens; those of the answer that broke off do not count.
    assert figures["output_tokens_per_s"] == 2.5
    assert (figures["num_met"], figures["goodput_requests_per_s"]) == (1, 0.5)


def test_failures_are_counted_by_code_with_what_the_first_was_told() -> None:
    assert RUN.errors == {"OVERLOADED": 2, "UNAVAILABLE": 1}
    assert RUN.error_details == {"OVERLOADED": "the queue is full", "UNAVAILABLE": "lost"}


def test_an_answer_that_is_short_without_an_error_is_a_failure() -> None:
    short = Outcome(num_prompt_tokens=1, max_tokens=5, token_s=(0.1,))
    assert Report(outcomes=(short,), duration_s=1.0).errors == {"SHORT": 1}


def test_percentiles_of_a_hundred_and_one_values_are_the_values() -> None:
    report = Report(outcomes=tuple(answered(n / 1000) for n in range(101)), duration_s=1.0)
    found = report.distribution("ttft_ms")
    assert found == pytest.approx({"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.0, "max": 100.0})


def test_nothing_measured_is_none_not_zero() -> None:
    report = Report(outcomes=(failed("UNAVAILABLE"),), duration_s=0.0)
    assert [report.distribution(name) for name in ("ttft_ms", "itl_ms", "e2e_ms")] == [None] * 3
    assert report.as_dict()["requests_per_s"] == 0.0
    assert report.goodput is None
