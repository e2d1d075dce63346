"""Which rates are worth measuring: bisection over a ladder of rates.

A synchronous core; it assumes that a side that attains at a rate does so at all lower ones.
"""

from __future__ import annotations

from collections.abc import Sequence


def ladder(middle: float, step: float, num_probes: int) -> list[float]:
    """Rates around `middle`, each `step` times the one before it: as many as num_probes windows tell apart.

    Bisection finds one of n + 1 places between n rates, so that n is 2^num_probes - 1.
    """
    half = 2 ** (num_probes - 1) - 1
    return [middle * step**number for number in range(-half, half + 1)]


class RateSearch:
    """One search over rising rates; it begins in the middle.

    It has ended when next_rate is None; goodput is then the highest rate that attains, 0.0 if none does.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates
        self._attained = -1
        self._failed = len(rates)

    @property
    def next_rate(self) -> float | None:
        """What to measure next."""
        if self._failed - self._attained == 1:
            return None
        return self._rates[(self._failed + self._attained) // 2]

    @property
    def goodput(self) -> float:
        """Highest rate known to attain; a lower bound if is_at_top."""
        return self._rates[self._attained] if self._attained >= 0 else 0.0

    @property
    def is_at_top(self) -> bool:
        """Whether even the highest rate attains."""
        return self._attained == len(self._rates) - 1

    def record(self, *, attained: bool) -> None:
        """The result of measuring next_rate."""
        middle = (self._failed + self._attained) // 2
        if attained:
            self._attained = middle
        else:
            self._failed = middle
