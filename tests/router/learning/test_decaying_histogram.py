"""The decaying histogram: its arithmetic by hand, and its bins."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from router.learning.decaying_histogram import EDGES, MAX_TOKENS, DecayingHistogram


def test_bins_ascend_and_grow_by_an_eighth_at_most() -> None:
    assert EDGES[:18] == list(range(18))
    for low, high in pairwise(EDGES[16:]):
        assert 0 < high - low <= low / 8
    assert EDGES[-1] >= MAX_TOKENS


def test_older_weights_shrink_by_the_decay() -> None:
    histogram = DecayingHistogram(0.5)
    histogram.add(3, 8.0)
    histogram.add(5, 2.0)
    assert histogram.total == pytest.approx(0.5 * 8 + 2)
    assert histogram.below(3) == 0
    assert histogram.below(4) == histogram.below(5) == pytest.approx(4)
    assert histogram.below(6) == pytest.approx(6)


def test_counts_inside_a_bin_are_equally_likely() -> None:
    low, high = next((low, high) for low, high in pairwise(EDGES) if low >= 100)
    histogram = DecayingHistogram(1.0)
    histogram.add(low, 10.0)
    middle = (low + high) / 2
    assert histogram.below(middle) == pytest.approx(5)
    assert histogram.position(5.0) == pytest.approx(middle)


def test_position_is_the_inverse_of_below() -> None:
    rng, histogram = random.Random(1), DecayingHistogram(0.99)
    for _ in range(300):
        histogram.add(int(10 ** rng.uniform(0, 5)), rng.uniform(0.1, 5))
    for _ in range(100):
        weight = histogram.total * rng.uniform(0.001, 1)
        assert histogram.below(histogram.position(weight)) == pytest.approx(weight)


def test_what_is_longer_than_the_last_bin_is_in_it() -> None:
    histogram = DecayingHistogram(1.0)
    histogram.add(MAX_TOKENS * 100)
    assert histogram.below(MAX_TOKENS / 2) == 0
    assert histogram.below(MAX_TOKENS * 100) == histogram.total == 1


def test_weights_stay_finite_over_any_number_of_additions() -> None:
    histogram = DecayingHistogram(0.01)
    for _ in range(200):  # 100 ** 200 is beyond a float
        histogram.add(7)
    assert histogram.total == pytest.approx(1 / 0.99)
    assert histogram.quantile(0.9) == 7
