"""Which process has a TCP socket, found in /proc.

Each file is read once: on some kernels a line of /proc/net/tcp takes a tenth of a millisecond, and every
connection of the last minute has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# gRPC's sockets are of both kinds, whatever the address.
_TABLES = ("/proc/net/tcp6", "/proc/net/tcp")
_ESTABLISHED = "01"


def owner_of(port: int, pids: Iterable[int]) -> int | None:
    """Which of the processes has the connection that comes from this port; None if none has, or any more."""
    inode = next((found for table in _TABLES if (found := _inode(Path(table), port))), "")
    link = f"socket:[{inode}]"
    return next((pid for pid in pids if inode and _has(pid, link)), None)


def _inode(table: Path, port: int) -> str:
    local_port = f":{port:04X}"
    with suppress(OSError):
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(local_port) and fields[3] == _ESTABLISHED:
                return fields[9]
    return ""


def _has(pid: int, link: str) -> bool:
    with suppress(OSError):
        return any(_target(descriptor) == link for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _target(descriptor: Path) -> str:
    with suppress(OSError):
        return str(descriptor.readlink())
    return ""
