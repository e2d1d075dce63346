"""Files of shared memory that a killed worker has left behind.

A worker holds a lock on its segment for as long as it lives (kvtransfer/transports/shm.py makes them), so
that anybody can tell one whose owner is dead. Knows nothing of what is inside.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def remove_stale(folder: Path) -> int:
    """Removes segments whose owner is dead; returns how many."""
    num_removed = 0
    for path in folder.glob("baton-*.kv"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_removed += 1
            finally:
                os.close(fd)
    return num_removed
