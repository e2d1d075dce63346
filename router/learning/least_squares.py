"""Least squares that forget: the sums of a linear model, and its coefficients, none of them negative.

Owns the arithmetic only. It does not know what is predicted, nor for whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Relative to each diagonal entry, so that it means the same in every unit. It keeps features that cannot be
# told apart solvable, and changes nothing that anybody could measure.
RIDGE = 1e-9


class LeastSquares:
    """Sums of one regression: `gram` is sum(w x x^T), `moment` is sum(w x y), `count` is sum(w).

    decay: what one observation leaves of the weight of those before it; 1 forgets nothing.
    """

    __slots__ = ("_decay", "count", "gram", "moment")

    def __init__(self, num_coefficients: int, decay: float = 1.0) -> None:
        self._decay = decay
        self.count = 0.0
        self.gram = [[0.0] * num_coefficients for _ in range(num_coefficients)]
        self.moment = [0.0] * num_coefficients

    def add(self, row: Sequence[float], target: float, weight: float = 1.0) -> None:
        """Learns that the coefficients' product with `row` should have been `target`."""
        decay, moment = self._decay, self.moment
        self.count = self.count * decay + weight
        for i, x in enumerate(row):
            scaled = x * weight
            moment[i] = moment[i] * decay + scaled * target
            sums = self.gram[i]
            for j, other in enumerate(row):
                sums[j] = sums[j] * decay + scaled * other

    def include(self, other: LeastSquares, weight: float) -> None:
        """Adds another regression's sums, each counted `weight` times."""
        self.count += other.count * weight
        for i, sums in enumerate(other.gram):
            self.moment[i] += other.moment[i] * weight
            mine = self.gram[i]
            for j, value in enumerate(sums):
                mine[j] += value * weight

    def solution(self) -> tuple[float, ...]:
        """The coefficients that fit best among those without a negative one; 0 where nothing was seen."""
        seen = [i for i in range(len(self.moment)) if self.gram[i][i] > 0]
        return tuple(_nonnegative(self, seen))


def _nonnegative(sums: LeastSquares, free: list[int]) -> list[float]:
    """Exact. Where the unbounded optimum has negative coefficients, the bounded one is 0 in one of them.

    For if it were positive in all of them, one could go from it a little towards the unbounded optimum, break
    no bound and fit better. So each is tried at 0, and the best fit is the one of the largest moment^T x.
    """
    solution = _solve(sums, free)
    negative = [i for i in free if solution[i] < 0]
    if not negative:
        return solution
    candidates = [_nonnegative(sums, [j for j in free if j != i]) for i in negative]
    return max(candidates, key=lambda found: _dot(sums.moment, found))


def _solve(sums: LeastSquares, free: list[int]) -> list[float]:
    """The unbounded optimum with all but the `free` coefficients at 0.

    Elimination without pivoting: the matrix is symmetric and positive definite.
    """
    rows = [[*(sums.gram[i][j] for j in free), sums.moment[i]] for i in free]
    size = len(rows)
    for i, row in enumerate(rows):
        row[i] *= 1 + RIDGE
    for i, pivot in enumerate(rows):
        for below in range(i + 1, size):
            row = rows[below]
            factor = row[i] / pivot[i]
            for j in range(i + 1, size + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * len(sums.moment)
    for i in range(size - 1, -1, -1):
        row = rows[i]
        known = sum(row[j] * solution[free[j]] for j in range(i + 1, size))
        solution[free[i]] = (row[size] - known) / row[i]
    return solution


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))
