"""The search for the highest rate that attains."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.rate_search import RateSearch, ladder

RATES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("capacity", range(8))
def test_it_finds_every_capacity_in_three_measurements(capacity: int) -> None:
    search = RateSearch(RATES)
    measured = []

    while (rate := search.next_rate) is not None:
        measured.append(rate)
        search.record(attained=rate <= capacity)

    assert search.goodput == capacity
    assert search.is_at_top == (capacity == 7)
    assert len(measured) == 3
    assert measured[0] == 4.0


def test_a_ladder_is_even_around_its_middle() -> None:
    rates = ladder(0.8, 1.15, 4)

    assert len(rates) == 15
    assert rates[7] == 0.8
    assert all(b / a == pytest.approx(1.15) for a, b in pairwise(rates))
    assert RateSearch(rates).next_rate == 0.8
