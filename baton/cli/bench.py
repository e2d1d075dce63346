"""`baton bench`: load on a running cluster, and what it measures."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from baton.bench.plot import can_draw, draw
from baton.bench.run import Plan, Run
from baton.bench.target import Target
from baton.cli import bench_options as opt
from baton.cli.bench_doors import Door, open_door
from baton.cli.bench_tables import print_report, record, title
from baton.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from baton.cli.interrupts import Interrupts
from baton.cli.options import Address, ApiKeyFile, InsecureKey, TlsCa, api_key
from baton.cli.progress_lines import ProgressLines
from baton.cli.up import exit_now
from baton.cluster.defaults import DEFAULT_ADDRESS, DEFAULT_HTTP_URL

_PROGRESS_S = 0.5


def bench(
    context: typer.Context,
    *,
    door: opt.Door = "grpc",
    address: Address = DEFAULT_ADDRESS,
    url: opt.Url = DEFAULT_HTTP_URL,
    tls_ca: TlsCa = None,
    api_key_file: ApiKeyFile = None,
    insecure_key: InsecureKey = False,
    concurrency: opt.Concurrency = opt.NUM_CALLERS,
    rate: opt.Rate = None,
    trace: opt.Trace = None,
    speed: opt.Speed = 1.0,
    requests: opt.Requests = None,
    seconds: opt.Seconds = None,
    warm_up: opt.WarmUp = 4,
    max_in_flight: opt.MaxInFlight = 512,
    timeout_s: opt.Deadline = 120.0,
    input_tokens: opt.InputTokens = "128",
    output_tokens: opt.OutputTokens = "32",
    shared_prefix: opt.SharedPrefix = 0,
    token_ids: opt.TokenIds = "100-1099",
    seed: opt.Seed = 0,
    slo: opt.Objectives = None,
    json_file: opt.JsonFile = None,
    details: opt.Details = False,
    plot: opt.PlotFile = None,
) -> None:
    """Measure a running cluster under load: latencies, throughput, goodput.

    Closed loop unless --rate or --trace is given. Prompts are random token ids; answers are greedy and end at
    their length. docs/cli.md says what each figure means. Ctrl-C reports what there is. Exit code 1: no
    request was answered; 3: nothing answers at the address.
    """
    given = {name: value for name, value in locals().items() if name != "context"}
    opt.refuse_unused(context.get_parameter_source, given)
    if plot is not None and not can_draw():
        hint = "matplotlib draws it, and is missing: pip install matplotlib"
        raise typer.BadParameter(hint, param_hint="'--plot'")
    plan = opt.read_plan(given)
    for flag, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and file != "-":
            opt.parsed(opt.check_writable, Path(file), flag)
    chosen = Door(
        name=door,
        where=address if door == "grpc" else url,
        tls_ca=tls_ca,
        api_key=api_key(api_key_file),
        insecure_key=insecure_key,
    )
    bench_run = _Bench(chosen, plan, given)
    interrupts = Interrupts(on_first=bench_run.note_interrupt, on_second=exit_now)
    asyncio.run(interrupts.run(bench_run.run()))
    bench_run.show(json_file, plot)
    if interrupts.num_heard:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not bench_run.num_complete:
        raise typer.Exit(EXIT_FAILED)


class _Bench:
    """One run, what it says meanwhile, and what it shows at its end."""

    def __init__(self, door: Door, plan: Plan, given: dict[str, Any]) -> None:
        self._door = door
        self._plan = plan
        self._given = given
        self._console = Console(stderr=True)
        self._run: Run | None = None
        self._model = ""

    @property
    def num_complete(self) -> int:
        """Requests that were answered completely."""
        return 0 if self._run is None else len(self._run.report().complete)

    def note_interrupt(self) -> None:
        """The first Ctrl-C."""
        self._console.print("interrupted; Ctrl-C again ends without a report", highlight=False)

    async def run(self) -> None:
        """Connects and measures."""
        async with open_door(self._door) as (target, model):
            self._model = model
            await self._measure(target)

    async def _measure(self, target: Target) -> None:
        self._run = Run(target, self._plan)
        async with ProgressLines(self._console) as progress:
            watching = asyncio.create_task(self._watch(self._run, progress), name="progress of the run")
            try:
                await self._run.run()
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    async def _watch(self, run: Run, progress: ProgressLines) -> None:
        """On a terminal often; elsewhere a line is a line for ever."""
        pause_s = _PROGRESS_S if self._console.is_terminal else 10.0
        while True:
            progress.show(run.described())
            await asyncio.sleep(pause_s)

    def show(self, json_file: str | None, plot: Path | None) -> None:
        """Prints the figures, or writes them where they were asked for."""
        if self._run is None:
            return
        report = self._run.report()
        if json_file != "-":
            print_report(Console(highlight=False, markup=False, soft_wrap=True), report, self._plan)
        if json_file is not None:
            found = record(report, self._given, model=self._model, details=self._given["details"])
            text = json.dumps(found, indent=1) + "\n"
            if json_file == "-":
                sys.stdout.write(text)
            else:
                Path(json_file).write_text(text, encoding="utf-8")
        if plot is not None:
            draw(report, title(self._plan, self._model), plot)
            self._console.print(f"picture: {plot}", highlight=False, markup=False, soft_wrap=True)
