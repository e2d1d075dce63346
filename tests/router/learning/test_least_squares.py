"""The forgetting least squares: exact under the bound, by the optimality conditions, and by hand."""

from __future__ import annotations

import random

import pytest

from router.learning.least_squares import LeastSquares


def gradient(rows: list[list[float]], targets: list[float], solution: tuple[float, ...]) -> list[float]:
    """Of half the squared error, by its definition."""
    residuals = [
        sum(x * s for x, s in zip(row, solution, strict=True)) - y
        for row, y in zip(rows, targets, strict=True)
    ]
    return [sum(r * row[i] for r, row in zip(residuals, rows, strict=True)) for i in range(len(solution))]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_other_coefficients_without_a_negative_one_fit_better(size: int) -> None:
    rng = random.Random(size)
    num_at_zero = 0
    for _ in range(100):
        rows = [[rng.uniform(-1, 1) for _ in range(size)] for _ in range(size + 4)]
        targets = [rng.uniform(-1, 1) for _ in rows]
        sums = LeastSquares(size)
        for row, target in zip(rows, targets, strict=True):
            sums.add(row, target)
        solution = sums.solution()
        # The Karush-Kuhn-Tucker conditions; the problem is convex, so they are sufficient.
        for value, slope in zip(solution, gradient(rows, targets, solution), strict=True):
            assert value >= 0
            assert slope == pytest.approx(0, abs=1e-6) if value else slope >= -1e-6
            num_at_zero += value == 0
    assert 40 < num_at_zero < 90 * size


def test_older_observations_weigh_less_by_the_decay() -> None:
    sums = LeastSquares(1, decay=0.5)
    sums.add([1.0], 8.0)
    sums.add([1.0], 2.0)
    assert sums.count == 1.5
    assert sums.solution() == pytest.approx([(0.5 * 8 + 2) / 1.5])


def test_a_feature_that_was_never_seen_has_the_coefficient_zero() -> None:
    sums = LeastSquares(3)
    sums.add([1.0, 0.0, 1.0], 4.0)
    sums.add([1.0, 0.0, 2.0], 7.0)
    assert sums.solution() == pytest.approx([1.0, 0.0, 3.0], abs=1e-6)
    assert LeastSquares(2).solution() == (0.0, 0.0)


def test_features_that_cannot_be_told_apart_still_fit() -> None:
    sums = LeastSquares(2)
    for _ in range(10):
        sums.add([1.0, 100.0], 50.0)
    a, b = sums.solution()
    assert a + 100 * b == pytest.approx(50.0, rel=1e-6)


def test_included_sums_count_as_often_as_they_are_told_to() -> None:
    one, other = LeastSquares(1), LeastSquares(1)
    one.add([1.0], 1.0)
    other.add([1.0], 5.0)
    one.include(other, 3.0)
    assert one.count == 4
    assert one.solution() == pytest.approx([(1 + 3 * 5) / 4])
