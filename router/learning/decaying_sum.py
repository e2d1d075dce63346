"""A sum that forgets: what was added counts half after each half-life. It reads no clock."""

from __future__ import annotations

import math


class DecayingSum:
    """A sum of amounts, each halved every half_life_s seconds since it was added.

    Times must not run backwards; an earlier one counts as the latest seen.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._at = -math.inf

    def add(self, amount: float, now: float) -> None:
        """Adds an amount at `now`, in seconds."""
        self._sum = self.value(now) + amount
        self._at = max(self._at, now)

    def value(self, now: float) -> float:
        """What is left of the sum at `now`."""
        if now <= self._at or not self._sum:
            return self._sum
        return float(self._sum * 0.5 ** ((now - self._at) / self._half_life_s))

    def per_second(self, now: float) -> float:
        """The steady rate of adding that would keep the sum where it is."""
        return self.value(now) * math.log(2) / self._half_life_s
