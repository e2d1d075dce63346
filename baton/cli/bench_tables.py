"""The figures of a run, for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import baton
from baton.bench.report import LATENCIES, Report
from baton.bench.run import Plan
from baton.cli.whole_table import print_whole

_NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E"}
_COLUMNS = ("p50", "p90", "p99", "mean", "max")
# Where the key is read from, and where results go, is no part of a result.
_NOT_RECORDED = frozenset({"api_key_file", "insecure_key", "json_file", "details", "plot", "tls_ca"})
# In an open loop, a client that sends later than this is itself too slow for what it is to measure.
_LATE_MS = 50.0


def title(plan: Plan, model: str) -> str:
    """What was measured, in a line."""
    if plan.trace:
        load = "trace replay"
    else:
        load = f"{plan.concurrency} callers" if plan.rate is None else f"{plan.rate:g} requests/s"
    return f"{model}, {load}" if model else load


def record(report: Report, given: dict[str, Any], *, model: str, details: bool) -> dict[str, Any]:
    """The run as plain JSON values: what was asked for, what came of it, and each request if wanted."""
    settings = {name: value for name, value in given.items() if name not in _NOT_RECORDED}
    unused = "url" if given["door"] == "grpc" else "address"
    del settings[unused]
    found: dict[str, Any] = {
        "version": baton.__version__,
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()},
        "figures": report.as_dict(),
    }
    if details:
        found["requests"] = [asdict(outcome) for outcome in report.outcomes]
    return found


def print_report(console: Console, report: Report, plan: Plan) -> None:
    """The figures as tables and lines."""
    print_whole(console, latency_table(report))
    console.print()
    for line in lines(report, plan):
        console.print(line)


def latency_table(report: Report) -> Table:
    """One row per latency, in milliseconds; a dash where nothing was measured."""
    table = Table("ms", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name in LATENCIES:
        found = report.distribution(name)
        table.add_row(_NAMES[name], *(f"{found[column]:,.1f}" if found else "-" for column in _COLUMNS))
    return table


def lines(report: Report, plan: Plan) -> Iterator[str]:
    """What is no latency."""
    figures = report.as_dict()
    yield (
        f"{figures['num_complete']} of {figures['num_requests']} requests answered in "
        f"{report.duration_s:.1f} s: {figures['requests_per_s']:.2f} requests/s, "
        f"{figures['input_tokens_per_s']:,.0f} prompt tokens/s, "
        f"{figures['output_tokens_per_s']:,.1f} output tokens/s"
    )
    if report.goodput is not None and report.outcomes:
        share = figures["num_met"] / len(report.outcomes)
        met = f"{figures['num_met']} met the objectives ({share:.0%})"
        yield f"goodput {report.goodput:.2f} requests/s: {met}"
    for code, count in report.errors.items():
        detail = report.error_details.get(code, "fewer tokens than asked for")
        yield f"{count} failed with {code}: {detail}"
    if not plan.is_closed and figures["sent_late_ms_max"] > _LATE_MS:
        yield (
            f"note: requests were sent up to {figures['sent_late_ms_max']:.0f} ms late; this client, or its "
            "machine, is busy, and latencies include that"
        )
