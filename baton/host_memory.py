"""How much memory of this machine an allocation could really get."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """What the machine has free and this process may use, in bytes; None where it cannot be known."""
    known = [limit for limit in (_of_host(meminfo), _of_cgroup(cgroup)) if limit is not None]
    return min(known, default=None)


def _of_host(meminfo: Path) -> int | None:
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_cgroup(root: Path) -> int | None:
    # A container's limit (cgroup v2) may be below what the host reports. File pages that can
    # be dropped count as used there, mapped weights among them, so they are given back.
    limit, current, stat = root / "memory.max", root / "memory.current", root / "memory.stat"
    if not all(path.exists() for path in (limit, current, stat)) or limit.read_text().strip() == "max":
        return None
    fields = dict(line.split() for line in stat.read_text().splitlines())
    droppable = int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))
    return max(0, int(limit.read_text()) - int(current.read_text()) + droppable)
