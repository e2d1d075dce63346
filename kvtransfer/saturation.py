"""Tells in the log of KV that float16 cannot hold: at once, and then once a minute.

Owns what was told last. Such KV does not fail: its requests answer, and the answers may be nonsense.
"""

from __future__ import annotations

from typing import Final

from baton.logs import get_logger

# The event of the log; `baton up` repeats it.
EVENT: Final = "KV exceeds float16"
INTERVAL_S: Final = 60.0
_REMEDY: Final = "answers may be wrong; set kv_dtype to bfloat16 or float32 (--decode-kv-dtype of baton up)"

log = get_logger(__name__)


class SaturationLog:
    """Counts values that were saturated on their way into a float16 cache."""

    def __init__(self) -> None:
        self._num_untold = 0
        self._told_at: float | None = None

    def add(self, num_values: int, now: float) -> None:
        """num_values: of one frame, maybe none. now: in seconds."""
        self._num_untold += num_values
        if not num_values or (self._told_at is not None and now < self._told_at + INTERVAL_S):
            return
        log.warning(EVENT, saturated_values=self._num_untold, remedy=_REMEDY)
        self._num_untold, self._told_at = 0, now
