"""A circuit breaker per worker: one that fails attempt after attempt gets no more for a while.

A synchronous core: time comes in as an argument. Only failures of the worker count, never errors
of a request or its client; one success forgets them all.

              NUM_FAILURES in a row            pause over
    closed ---------------------------> open -------------> half-open --- success ---> closed
                                          ^                     |
                                          +------ failure ------+   (the pause doubles)
"""

from __future__ import annotations

NUM_FAILURES = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """The record of one worker at one router."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until: float | None = None
        self._is_probing = False

    def allows(self, now: float) -> bool:
        """Whether an attempt may be placed: always while closed, one at a time while half-open."""
        if self._open_until is None:
            return True
        return now >= self._open_until and not self._is_probing

    def placed(self) -> None:
        """An attempt was placed; while half-open it is the probe."""
        self._is_probing = self._open_until is not None

    def ended(self) -> None:
        """An attempt ended without telling anything of the worker, by cancel or by its own error."""
        self._is_probing = False

    def succeeded(self) -> None:
        """The worker did what it was asked."""
        self._num_failures, self._pause_s, self._open_until, self._is_probing = 0, FIRST_PAUSE_S, None, False

    def failed(self, now: float) -> None:
        """An attempt failed, and the worker may be why."""
        self._num_failures += 1
        self._is_probing = False
        if self._num_failures >= NUM_FAILURES:
            self._open_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
