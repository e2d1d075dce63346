"""Says in the log how far a model's weights are, and at last what was loaded.

`baton up` reads these lines to tell its user; see baton/cluster/start_news.py. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.logs import get_logger

INTERVAL_S = 1.0

log = get_logger(__name__)


class LoadLog:
    """The report of one model's loading; usable as engine.model.weights.Report.

    Its first line comes when INTERVAL_S have passed, the others that far apart: a model that is there at
    once has the last line alone. clock: the event loop's; it is asked on
    the thread that loads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = self._said_s = clock()
        self._bytes_read = 0

    def __call__(self, bytes_read: int, total_bytes: int) -> None:
        """So many bytes of the files are read, of so many."""
        self._bytes_read = bytes_read
        now_s = self._clock()
        if now_s - self._said_s < INTERVAL_S:
            return
        self._said_s = now_s
        percent = 100 * bytes_read // max(1, total_bytes)
        log.info("loading weights", percent=percent, bytes_read=bytes_read, total_bytes=total_bytes)

    def finish(self, *, dtype: str) -> None:
        """All is loaded. dtype: what the weights are in memory."""
        seconds = round(self._clock() - self._started_s, 3)
        log.info("weights loaded", bytes_read=self._bytes_read, seconds=seconds, dtype=dtype)
