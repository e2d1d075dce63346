"""What the clients' runs came to, as the dated file under benchmarks/results/ keeps it.

Nothing in it names the machine's folders: commands are kept as the documentation writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.bench.percentiles import percentile
from benchmarks.clients.environments import listed
from benchmarks.clients.runs import Client, Report, Run, Target
from benchmarks.report import Row, publish

# The cluster and the tokenizer of the documentation.
SHOWN = Target(url="http://127.0.0.1:8000", model="smollm2-135m-instruct", tokenizer="$MODEL_FOLDER")


def shown(client: Client) -> dict[str, str]:
    """The command of each load by its name, as the documentation writes it."""
    return {run.name: " ".join(run.command) for run in client.runs(SHOWN)}


class Record:
    """Rows and reports of all runs, and everything that is wrong."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._rows: list[Row] = []
        self._runs: list[dict[str, Any]] = []
        self._versions: dict[str, str] = {}
        self.complaints: list[str] = []

    def add_missing(self, client: Client, reason: str) -> None:
        """A client that cannot be installed: a row without a value, and no pass."""
        self._rows.append(Row(metric=f"{client.name}: installed", unit="", ours=None, runs=0))
        self.complaints.append(f"{client.name}: cannot be installed: {reason}")

    def add_failure(self, client: Client, run: Run, reason: str, target: Target, folder: Path) -> None:
        """A run without a report."""
        for place, name in ((str(folder), "RUN_FOLDER"), (target.tokenizer, SHOWN.tokenizer)):
            reason = reason.replace(place, name)
        self.add(client, run, Report(answers=[]), [reason])

    def add(self, client: Client, run: Run, report: Report, complaints: list[str]) -> None:
        """A run and what is wrong with it."""
        name = f"{client.name} {run.name}"
        self._versions[client.name] = listed(client)[client.package]
        self._rows += _rows(name, report)
        self._runs.append(
            {
                "client": client.name,
                "run": run.name,
                "command": shown(client)[run.name],
                "answered": len(report.answers),
                "given_up": report.num_cancelled,
                "complaints": complaints,
                "report": report.kept,
            }
        )
        self.complaints += [f"{name}: {complaint}" for complaint in complaints]

    def publish(self, json_path: str | None, folder: Path) -> Path:
        """Prints and keeps it; returns where."""
        return publish(
            "clients",
            self._rows,
            json_path,
            folder=folder,
            model=self._model,
            versions=self._versions,
            runs=self._runs,
            passed=not self.complaints,
        )


def _rows(name: str, report: Report) -> list[Row]:
    answers = report.answers
    rows = [Row(metric=f"{name}: answered", unit="requests", ours=len(answers), runs=1)]
    if answers:
        rows += [
            Row(metric=f"{name}: {label} p50", unit="ms", ours=percentile(values, 50), runs=len(answers))
            for label, values in (
                ("ttft", [answer.ttft_ms for answer in answers]),
                ("itl", [answer.itl_ms for answer in answers]),
            )
        ]
    return rows
