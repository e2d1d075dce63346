"""Runs a client's loads one after another and judges each."""

from __future__ import annotations

from pathlib import Path

from benchmarks.clients.processes import ProgramError, finish
from benchmarks.clients.record import Record
from benchmarks.clients.runs import Client, Report, Run, Target
from benchmarks.clients.served import Trace
from benchmarks.clients.verdict import complaints

RUN_S = 300.0


def run_all(
    client: Client, programs: Path, *, target: Target, trace: Trace, folder: Path, record: Record
) -> None:
    """Adds to the record what became of every load.

    programs: folder of the client's program.
    folder: where a folder for each run is made.
    """
    trace.skip()
    for run in client.runs(target):
        print(f"{client.name}: {run.name}", flush=True)
        place = folder / f"{client.name}-{run.name.replace(' ', '-')}"
        place.mkdir()
        try:
            report = _report(client, programs, run, place)
        except (ProgramError, OSError, LookupError, TypeError, ValueError) as error:
            # Whatever the client left is no report that says what was asked: that fails the run.
            record.add_failure(client, run, f"no report: {type(error).__name__}: {error}", target, folder)
            trace.skip()
            continue
        served = trace.since(len(report.answers) + report.num_cancelled)
        record.add(client, run, report, complaints(run, report, served))


def _report(client: Client, programs: Path, run: Run, place: Path) -> Report:
    program, *arguments = run.command
    finish(
        (str(programs / program), *arguments),
        log=place / "log.txt",
        timeout_s=RUN_S,
        cwd=place,
        env={"DO_NOT_TRACK": "1", "NO_COLOR": "1", **client.variables},
    )
    return run.read(place)
