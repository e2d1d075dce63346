"""When a role that died is started again: a plain core without clock, process or log."""

from __future__ import annotations

import random

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
GROWTH = 3.0
# A role that lived this long was healthy; its next death starts a new count.
STEADY_S = 30.0
MAX_QUICK_DEATHS = 5
# What leaves by itself at once, again and again, is started no more often than this.
LEAST_LIFE_S = 0.5


class RestartPolicy:
    """The pauses of one role. The first is short, because most deaths are a kill or a lost race."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_quick_deaths = 0

    def pause_s(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start, or None when the role is to be given up.

        lived_s: how long the role ran before this death, in seconds.
        """
        if lived_s >= STEADY_S:
            self._num_quick_deaths = 0
        self._num_quick_deaths += 1
        if self._num_quick_deaths >= MAX_QUICK_DEATHS:
            return None
        ceiling_s = min(FIRST_PAUSE_S * GROWTH ** (self._num_quick_deaths - 1), LONGEST_PAUSE_S)
        # Half of it is drawn, so that workers that died together do not come back together.
        return self._rng.uniform(ceiling_s / 2, ceiling_s)


def pause_after_leaving_s(lived_s: float) -> float:
    """Seconds to wait before the next start of a role that left because it was asked to; 0 as a rule."""
    return max(0.0, LEAST_LIFE_S - lived_s)
