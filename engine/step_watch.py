"""Tells a step that takes long from a device that is stuck, and a loop without work from one that is frozen.

A synchronous core: time comes in as an argument. A step is allowed three times the longest of
the steps before it, and never less than MIN_ALLOWED_S; while there is little to compare with,
FIRST_ALLOWED_S. So long may a loop that was woken leave its work alone as well. What is overdue is
wedged, and may recover; what is overdue by LIVENESS_S is given up.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MIN_ALLOWED_S: Final = 2.0
# The first steps pay for lazy initialisation, and say little about a full batch. Whoever waits for a worker
# that is stuck from the beginning knows it within ten seconds.
FIRST_ALLOWED_S: Final = 9.0
NUM_FIRST_STEPS: Final = 8
NUM_REMEMBERED: Final = 64
MARGIN: Final = 3.0
LIVENESS_S: Final = 30.0


class StepWatch:
    """The step in flight and the durations of those before it, in seconds."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._woken_at: float | None = None
        self._durations: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def woken(self, now: float) -> None:
        """There may be work."""
        if self._woken_at is None:
            self._woken_at = now

    def looked(self) -> None:
        """All the work there is has been seen."""
        self._woken_at = None

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began_at = now

    def end(self, now: float) -> None:
        """The step in flight has ended; what came meanwhile waits from now on."""
        if self._began_at is not None:
            self._durations.append(now - self._began_at)
        self._began_at = None
        if self._woken_at is not None:
            self._woken_at = now

    @property
    def allowed_s(self) -> float:
        """How long a step may take."""
        if len(self._durations) < NUM_FIRST_STEPS:
            return FIRST_ALLOWED_S
        return max(MIN_ALLOWED_S, MARGIN * max(self._durations))

    def is_wedged(self, now: float) -> bool:
        """Whether the step in flight, or the next one, has taken longer than it may."""
        return self._overdue_s(now) > 0

    def is_given_up(self, now: float) -> bool:
        """Whether that is so for LIVENESS_S: nothing is to be expected any more."""
        return self._overdue_s(now) > LIVENESS_S

    def _overdue_s(self, now: float) -> float:
        if self._began_at is not None:
            return now - self._began_at - self.allowed_s
        return 0.0 if self._woken_at is None else now - self._woken_at - FIRST_ALLOWED_S
