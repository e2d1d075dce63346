"""Arrival times: their rate, how they scatter, and that a rate only scales them."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from baton.bench.arrivals import bursty_gaps, poisson_gaps, trace_gaps, window


def test_poisson_gaps_have_mean_1_and_scatter_as_much() -> None:
    gaps = list(islice(poisson_gaps(random.Random(1)), 20_000))

    # The mean of n exponentials has a standard error of 1 / sqrt(n), here 0.7 %.
    assert fmean(gaps) == pytest.approx(1.0, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.0, rel=0.03)


def test_bursty_gaps_have_mean_1_and_the_scatter_asked_for() -> None:
    gaps = list(islice(bursty_gaps(random.Random(2), 3.0), 40_000))

    assert fmean(gaps) == pytest.approx(1.0, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(3.0, rel=0.08)
    # A burst: most gaps are far below the mean.
    assert sorted(gaps)[len(gaps) // 2] < 0.1


def test_bursts_need_more_scatter_than_poisson_has() -> None:
    with pytest.raises(ValueError, match="cv is 1"):
        next(bursty_gaps(random.Random(0), 1.0))


def test_a_window_holds_what_arrives_in_it() -> None:
    assert window(iter([1.0, 1.0, 4.0, 1.0]), 2.0, 3.5) == [0.5, 1.0, 3.0]


def test_the_number_of_arrivals_is_rate_times_duration() -> None:
    times = window(poisson_gaps(random.Random(3)), 5.0, 2000.0)

    # 10,000 expected, with a standard deviation of 100.
    assert len(times) == pytest.approx(10_000, abs=400)
    assert all(earlier < later for earlier, later in pairwise(times))


def test_twice_the_rate_is_the_same_sequence_at_half_the_gaps() -> None:
    slow = window(bursty_gaps(random.Random(4), 2.0), 1.0, 40.0)
    fast = window(bursty_gaps(random.Random(4), 2.0), 2.0, 20.0)

    assert fast == pytest.approx([at / 2 for at in slow])


def test_a_trace_keeps_its_shape_and_begins_anew_after_its_end() -> None:
    # Three gaps over 6 s: a mean of 2.
    gaps = trace_gaps([10.0, 11.0, 11.0, 16.0])

    assert list(islice(gaps, 6)) == [1.0, 0.5, 0.0, 2.5, 1.0, 0.5]


@pytest.mark.parametrize("times", [[], [3.0], [3.0, 3.0]])
def test_a_trace_without_two_times_has_no_rate(times: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two"):
        next(trace_gaps(times))
