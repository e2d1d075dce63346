"""Lines of our own logs, read back."""

from __future__ import annotations

import json


def read_entry(line: bytes | str) -> dict[str, object]:
    """The fields of one line; {} if it is no entry of ours.

    A library's line is none, nor one that is being written, nor one for people at a terminal.
    """
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) and "event" in entry else {}
