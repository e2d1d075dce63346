"""What `benchmarks.gpu` prints and keeps: each row as it comes, all in files, a short table last."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.on_gpu.section import DEVICE, GpuRow
from benchmarks.report import keep

MAX_LINES, MAX_COLUMNS, METRIC_COLUMNS = 40, 100, 38


class Record:
    """Rows as they come. Whatever ends the run, those before are printed, and in a file of one row a line.

    folder: of the results; it is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[GpuRow] = []
        self.path = folder / "gpu-unfinished.jsonl"
        self._folder = folder
        self.path.write_text("", encoding="utf-8")

    def add(self, rows: Iterable[GpuRow]) -> None:
        """Prints and writes each."""
        for row in rows:
            self.rows.append(row)
            print(full_line(row), flush=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def close(self, json_path: str | None, *, seconds: float, quick: bool) -> None:
        """Writes the other files, which take the place of that one, and prints the table."""
        device = next((row.note for row in self.rows if row.metric == DEVICE), "")
        facts = {"accelerator": device, "seconds": seconds, "quick": quick}
        kept = keep("gpu", self.rows, json_path, folder=self._folder, **facts)
        with suppress(FileNotFoundError):
            self.path.unlink()
        print(f"kept as {kept}\n")
        for line in table(self.rows):
            print(line, flush=True)


def table(rows: Sequence[GpuRow]) -> list[str]:
    """At most MAX_LINES of MAX_COLUMNS. What failed comes first, and what was not run last."""
    shown = [row for row in rows if row.in_table or row.has_failed]
    shown.sort(key=lambda row: 0 if row.has_failed else 2 if row.trouble else 1)
    failed, left_out = (sum(row.trouble.startswith(word) for row in rows) for word in ("failed", "not run"))
    last = f"{len(rows)} rows, {failed} failed, {left_out} not run"
    if len(shown) >= MAX_LINES:
        last += f"; {len(shown) - MAX_LINES + 1} of this table are in the file alone"
    return [line(row) for row in shown[: MAX_LINES - 1]] + [last]


def line(row: GpuRow) -> str:
    """Of a row, with as many of its figures as have room."""
    said = _start(row)
    if row.trouble or row.note:
        return said[:MAX_COLUMNS].rstrip()
    separator = " "
    for figure in _figures(row):
        if len(said) + len(separator) + len(figure) > MAX_COLUMNS:
            break
        said += separator + figure
        separator = ", "
    return said.rstrip()


def full_line(row: GpuRow) -> str:
    """Of a row, with all of them."""
    return _start(row) if row.trouble or row.note else f"{_start(row)} {', '.join(_figures(row))}".rstrip()


def _start(row: GpuRow) -> str:
    if row.trouble or row.note:
        return f"{row.metric:<{METRIC_COLUMNS}} {row.trouble or row.note}"
    total = f"of {row.runs}" if row.unit == "passed" else row.unit
    return f"{row.metric:<{METRIC_COLUMNS}} {_short(row.ours):>8} {total:<8}"


def _figures(row: GpuRow) -> Iterator[str]:
    if row.ratio is not None:
        yield f"{row.ratio:.2f}x {row.peer_name}"
    for name, figure in row.also.items():
        yield f"{name} {_short(figure)}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
