"""A sum that forgets, by arithmetic."""

from __future__ import annotations

import math

import pytest

from router.learning.decaying_sum import DecayingSum


def test_an_amount_counts_half_after_each_half_life() -> None:
    total = DecayingSum(10.0)
    assert total.value(5.0) == 0.0
    total.add(8.0, 100.0)
    assert total.value(100.0) == 8.0
    assert total.value(110.0) == pytest.approx(4.0)
    total.add(4.0, 110.0)
    assert total.value(130.0) == pytest.approx(2.0)


def test_a_time_that_runs_backwards_counts_as_the_latest_seen() -> None:
    total = DecayingSum(10.0)
    total.add(8.0, 100.0)
    total.add(8.0, 90.0)
    assert total.value(95.0) == 16.0
    assert total.value(110.0) == pytest.approx(8.0)


def test_adding_steadily_shows_its_rate() -> None:
    total = DecayingSum(5.0)
    for step in range(10_000):
        total.add(0.3, step / 100)
    assert total.per_second(100.0) == pytest.approx(30.0, rel=0.01)


def test_what_is_very_old_is_nothing() -> None:
    total = DecayingSum(1.0)
    total.add(1.0, 0.0)
    assert total.value(1e6) == 0.0
    assert not math.isnan(total.per_second(1e6))
