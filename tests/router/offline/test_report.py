from __future__ import annotations

import math

import pytest

from router.offline.recording import Outcome
from router.offline.report import Figures, percentile, table
from tests.router.offline.recordings import request


def outcome(
    num_prompt_tokens: int, ttft_ms: float, itl_ms: float = 10.0, worker: str = "p0", compute_ms: float = 1.0
) -> Outcome:
    return Outcome(
        request=request(1, 0.0, num_prompt_tokens, 5, objective_ms=100.0),
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        prefill_worker=worker,
        decode_worker="d0",
        compute_ms=compute_ms,
        num_computed_tokens=num_prompt_tokens,
        num_cached_tokens=0,
    )


@pytest.mark.parametrize(
    ("values", "percentage", "expected"),
    [([3, 1, 2], 50, 2), ([1, 2, 3, 4], 50, 2), ([1, 2, 3, 4], 99, 4), (range(1, 101), 90, 90), ([7], 1, 7)],
)
def test_percentiles_are_values_that_occur(values, percentage, expected) -> None:
    assert percentile(list(values), percentage) == expected


def test_nothing_has_no_percentile() -> None:
    assert math.isnan(percentile([], 50))


def test_figures_are_told_by_class_of_length() -> None:
    outcomes = [outcome(127, 10), outcome(128, 20), outcome(511, 30), outcome(512, 40)]
    figures = Figures.of("x", outcomes, itl_objective_ms=150, computing=["p0"])
    assert figures.ttft_ms == {
        "<128": {50: 10, 90: 10, 99: 10},
        "128-511": {50: 20, 90: 30, 99: 30},
        ">=512": {50: 40, 90: 40, 99: 40},
    }


def test_both_objectives_must_be_met() -> None:
    outcomes = [outcome(10, 100, 20), outcome(10, 101, 20), outcome(10, 50, 21), outcome(10, 50, 5)]
    assert Figures.of("x", outcomes, itl_objective_ms=20, computing=["p0"]).attainment == 0.5


def test_balance_compares_the_busiest_with_the_mean_of_all_who_could_compute() -> None:
    outcomes = [outcome(10, 1, worker="p0", compute_ms=30), outcome(10, 1, worker="p1", compute_ms=10)]
    figures = Figures.of("x", outcomes, itl_objective_ms=20, computing=["p0", "p1", "p2", "p3"])
    assert figures.balance == 3.0


def test_the_table_has_a_line_per_policy() -> None:
    figures = Figures.of("cost", [outcome(10, 12.4)], itl_objective_ms=20, computing=["p0"])
    lines = table([figures])
    assert lines[-1].split() == ["cost", "12", "12", "12", *"------", "10.0", "100.0%", "1.00"]
    assert max(map(len, lines)) <= 120
