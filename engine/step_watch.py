"""Tells a step that takes long from a device that is stuck.

A synchronous core: time comes in as an argument. A step is allowed three times the longest of
the steps before it, and never less than MIN_ALLOWED_S; while there is little to compare with,
FIRST_ALLOWED_S.
"""

from __future__ import annotations

from collections import deque

MIN_ALLOWED_S = 2.0
# The first steps pay for lazy initialisation, and say little about a full batch.
FIRST_ALLOWED_S = 10.0
NUM_FIRST_STEPS = 8
NUM_REMEMBERED = 64
MARGIN = 3.0


class StepWatch:
    """The step in flight and the durations of those before it, in seconds."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._durations: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began_at = now

    def end(self, now: float) -> None:
        """The step in flight has ended."""
        if self._began_at is not None:
            self._durations.append(now - self._began_at)
        self._began_at = None

    @property
    def allowed_s(self) -> float:
        """How long a step may take."""
        if len(self._durations) < NUM_FIRST_STEPS:
            return FIRST_ALLOWED_S
        return max(MIN_ALLOWED_S, MARGIN * max(self._durations))

    def is_wedged(self, now: float) -> bool:
        """Whether the step in flight has taken longer than it may."""
        return self._began_at is not None and now - self._began_at > self.allowed_s
