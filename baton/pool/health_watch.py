"""When a worker that lives counts as useless: a plain core.

Only time in which the worker was asked counts. A pool that was stopped itself finds a long silence
when it goes on, for which no worker is to blame.
"""

from __future__ import annotations

from typing import Final

from baton.health import WorkerHealth

ASK_EVERY_S: Final = 1.0
ANSWER_WITHIN_S: Final = 2.0
SHOWN_AFTER_S: Final = 3.0


class HealthWatch:
    """What is known of one worker's progress. heard() takes each question's outcome.

    replaced_after_s: so much time without progress, in seconds, makes a worker lost.
    """

    def __init__(self, replaced_after_s: float) -> None:
        self._replaced_after_s = replaced_after_s
        self.stalled_s = 0.0
        self.reason = ""
        self._shown_after_s = 0.0

    @property
    def is_unhealthy(self) -> bool:
        """Whether to show it as unhealthy."""
        return bool(self.reason) and self.stalled_s >= self._shown_after_s

    @property
    def is_lost(self) -> bool:
        """Whether to replace it."""
        return self.stalled_s >= self._replaced_after_s

    def heard(self, elapsed_s: float, health: WorkerHealth | None, *, is_excused: bool = False) -> None:
        """Takes down one outcome.

        elapsed_s: since the outcome before.
        health: the answer; None if there was none in time.
        is_excused: others are silent too, so the network or this very machine may be what is cut off.
            The silence is shown, and nothing follows from it.
        """
        if health is not None and health.is_alive:
            self.stalled_s, self.reason = 0.0, ""
            return
        stalled_s = self.stalled_s + min(elapsed_s, ASK_EVERY_S + ANSWER_WITHIN_S)
        self.stalled_s = min(stalled_s, max(self.stalled_s, SHOWN_AFTER_S)) if is_excused else stalled_s
        if health is None:
            # A busy machine answers late; one late answer is not worth showing.
            self.reason, self._shown_after_s = "it does not answer", SHOWN_AFTER_S
        else:
            self.reason, self._shown_after_s = health.reason or "it makes no progress", 0.0
