"""Warnings in the workers' logs that whoever watches the cluster must see: what they set does not hold.

Owns how far each log has been read. Logs on other machines stay there, unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from baton.cluster.log_entries import read_entry

# Of one log at a time: whoever logs more than this between two looks is read a little later.
_MAX_BYTES = 1 << 20
# Events of engine/model/compiled.py and kvtransfer/saturation.py.
_EVENTS = frozenset({"layers are not compiled", "KV exceeds float16"})


class LogWarnings:
    """Follows all logs of a folder. Make it before any worker starts: what they hold by then is older."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read = {path: path.stat().st_size for path in logs.glob("*.log")}

    def lines(self) -> list[str]:
        """The warnings since the last call, each as a line for people."""
        return [line for path in sorted(self._logs.glob("*.log")) for line in self._new(path)]

    def _new(self, path: Path) -> Iterator[str]:
        with path.open("rb") as log:
            log.seek(self._read.get(path, 0))
            text = log.read(_MAX_BYTES)
        # What is being written is read when it is whole.
        whole = text[: text.rfind(b"\n") + 1] if len(text) < _MAX_BYTES else text
        self._read[path] = self._read.get(path, 0) + len(whole)
        for line in whole.splitlines():
            entry = read_entry(line)
            if entry.get("event") in _EVENTS:
                yield _readable(path.stem, entry)


def _readable(name: str, entry: dict[str, object]) -> str:
    what = f"warning: {name}: {entry['event']}"
    if "reason" in entry:
        what += f": {entry['reason']}"
    if "saturated_values" in entry:
        what += f" ({entry['saturated_values']} values)"
    return f"{what}; {entry['remedy']}" if "remedy" in entry else what
