"""What `benchmarks.gpu` prints and keeps of its rows: all of them in the files, a short table last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.on_gpu.facts import DEVICE
from benchmarks.on_gpu.section import GpuRow
from benchmarks.report import publish

MAX_LINES, MAX_COLUMNS = 40, 100
# Further figures in a line.
_FIGURES = 3


def report(
    rows: Sequence[GpuRow], json_path: str | None, folder: Path, *, seconds: float, quick: bool
) -> None:
    """Writes the files and prints the table."""
    device = next((row.note for row in rows if row.metric == DEVICE), "")
    kept = publish("gpu", rows, json_path, folder=folder, accelerator=device, seconds=seconds, quick=quick)
    print(f"kept as {kept}\n")
    for line in table(rows):
        print(line)


def table(rows: Sequence[GpuRow]) -> list[str]:
    """At most MAX_LINES of MAX_COLUMNS. What failed comes first: it is what nobody may miss."""
    shown = [row for row in rows if row.has_failed]
    shown += [row for row in rows if row.in_table and not row.has_failed]
    failed, left_out = (sum(row.trouble.startswith(word) for row in rows) for word in ("failed", "not run"))
    last = f"{len(rows)} rows, {failed} failed, {left_out} not run"
    if len(shown) >= MAX_LINES:
        last += f"; {len(shown) - MAX_LINES + 1} of this table are in the file alone"
    return [_line(row)[:MAX_COLUMNS].rstrip() for row in shown[: MAX_LINES - 1]] + [last]


def _line(row: GpuRow) -> str:
    if row.trouble or row.note:
        return f"{row.metric:<38.38} {row.trouble or row.note}"
    total = f"of {row.runs}" if row.unit == "passed" else row.unit
    value = f"{row.metric:<38.38} {_short(row.ours):>8} {total:<8}"
    return f"{value} {', '.join(_figures(row))}"


def _figures(row: GpuRow) -> Iterator[str]:
    if row.ratio is not None:
        yield f"{row.ratio:.2f}x {row.peer_name}"
    for name, figure in list(row.also.items())[:_FIGURES]:
        yield f"{name} {_short(figure)}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
