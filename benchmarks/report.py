"""Rows of a benchmark's result, and where they are kept.

A row compares one metric with one peer. ratio is above 1 when ours is better,
whatever the unit; target is the ratio to reach. A peer that is not installed
leaves peer and ratio null, and ours too where nothing is left to compare. A dated copy of
every result, with the hardware in its name, goes to benchmarks/results/.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric. runs: how many values the median was taken of."""

    metric: str
    unit: str
    ours: float | None
    runs: int
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    target: float | None = None


def publish(
    name: str,
    rows: Sequence[Row],
    json_path: str | None,
    *,
    folder: Path = RESULTS,
    **facts: object,
) -> Path:
    """Prints the rows, and keeps them; see keep()."""
    for row in rows:
        print(f"{row.metric:<44} {_short(row.ours):>8} {row.unit:<9} {_versus(row)}")
    return keep(name, rows, json_path, folder=folder, **facts)


def keep(
    name: str, rows: Sequence[Row], json_path: str | None, *, folder: Path = RESULTS, **facts: object
) -> Path:
    """Writes the rows to json_path if given, and keeps a dated copy; returns the copy's path.

    facts: what else the copy is to say; an accelerator among them, if one computed, is part of its name.
    """
    machine = hardware(str(facts.get("accelerator", "")))
    document = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    if json_path is not None:
        Path(json_path).write_text(document, encoding="utf-8")
    now = datetime.now(UTC)
    folder.mkdir(exist_ok=True)
    kept = folder / f"{now:%Y-%m-%d}-{name}-{machine}.json"
    if kept.exists():
        # A result that is kept is never overwritten by the next run of the same day.
        kept = folder / f"{now:%Y-%m-%dT%H%M%S}-{name}-{machine}.json"
    record = {"date": now.isoformat(timespec="seconds"), "hardware": machine, **facts}
    kept.write_text(
        json.dumps({**record, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8"
    )
    return kept


def hardware(accelerator: str = "") -> str:
    """A short name of this machine, for file names: its accelerator, cores and processor."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        model = match.group(1) if match else model
    parts = [accelerator, f"{os.cpu_count()}x", model]
    slugs = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part]
    return "-".join(slugs)[:60]


def _versus(row: Row) -> str:
    if row.ratio is None:
        return ""
    goal = "" if row.target is None else f", target {row.target}"
    return f"{row.ratio:5.2f}x of {row.peer_name} ({_short(row.peer)}){goal}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
