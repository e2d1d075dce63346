"""What a cluster that starts says: who is waited for, and how far those are that load weights.

Reads the ends of the workers' logs: a worker that loads serves nothing yet, so nobody could ask it. Workers
on other machines keep their logs there; nothing is said of their loading.
"""

from __future__ import annotations

import os
from pathlib import Path

from baton.cluster.log_entries import read_entry

# How often the weights are told of, in seconds; the first time is as long after the start.
INTERVAL_S = 3.0
# More than a log's last line takes.
_MAX_END_BYTES = 4096
# The event of engine/load_log.py.
_LOADING = "loading weights"
# One of engine/engine.py.
_COMPILING = "compiling layers"


class StartNews:
    """Decides what is worth a line.

    Make it before any worker starts: what a log holds by then is of an earlier run.

    logs: folder of the log files, one per worker.  now_s: the time, as line()'s.
    """

    def __init__(self, logs: Path, now_s: float) -> None:
        self._logs = logs
        self._starts = {path.name: path.stat().st_size for path in logs.glob("*.log")}
        self._waiting: frozenset[str] = frozenset()
        self._due_s = now_s + INTERVAL_S
        self._said = ""

    def line(self, waiting: frozenset[str], now_s: float) -> str:
        """What to say now of those that are waited for; "" if that is nothing new, or too soon."""
        is_due = now_s >= self._due_s
        if not waiting or (waiting == self._waiting and not is_due):
            return ""
        self._waiting = waiting
        if is_due:
            self._due_s = now_s + INTERVAL_S
        line = f"waiting for {', '.join(name + self._loading(name) for name in sorted(waiting))}"
        before, self._said = self._said, line
        return line if line != before else ""

    def _loading(self, name: str) -> str:
        """How far its weights are, or that it compiles; "" unless that is the last thing that it has told."""
        path = self._logs / f"{name}.log"
        entry = _last_entry(path, self._starts.get(path.name, 0))
        if entry.get("event") == _COMPILING:
            return f" ({_COMPILING})"
        if entry.get("event") != _LOADING or "percent" not in entry:
            return ""
        return f" ({_LOADING}, {entry['percent']} %)"


def _last_entry(path: Path, start: int) -> dict[str, object]:
    """The last line behind start, in bytes, that is one of our own; {} if there is none."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - _MAX_END_BYTES))
            lines = log.read(_MAX_END_BYTES).splitlines()
    except OSError:
        # Not made yet, or not on this machine.
        return {}
    entries = (read_entry(line) for line in reversed(lines))
    return next((entry for entry in entries if entry), {})
