"""The picture of a run: latency, processor time per request and decision, and per token, over workers.

Owns the drawing only. matplotlib is installed for development and imported nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

from baton.bench.percentiles import percentile
from benchmarks.router_cost import BUSY, LATENCY_MS, REQUEST_US, Scale
from benchmarks.router_decision import DECISION_US, Decisions

OURS, BARE, DECIDES = "tab:blue", "tab:gray", "tab:green"


def draw(scales: Sequence[Scale], decided: Sequence[Decisions], path: Path) -> Path:
    """Writes the SVG file and returns its path."""
    mpl.use("svg")
    # The same figures make the same file, but for the date.
    mpl.rcParams["svg.hashsalt"] = "baton"
    from matplotlib import pyplot  # noqa: PLC0415 - after the backend is chosen

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    _draw_latency(axes[0], scales)
    _draw_requests(axes[1], scales, decided)
    _draw_tokens(axes[2], scales)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _draw_latency(axes: Any, scales: Sequence[Scale]) -> None:
    workers = [scale.router.num_workers for scale in scales]
    for percent, style in ((50, "o-"), (99, "o--")):
        for label, values in (("x1", "one_ms"), (f"x{BUSY}", "busy_ms")):
            line = [percentile(getattr(scale.router, values), percent) for scale in scales]
            color = OURS if label == "x1" else "tab:orange"
            axes.plot(workers, line, style, color=color, label=f"{label}, p{percent}")
    bare = [percentile(scale.control.one_ms, 50) for scale in scales]
    axes.plot(workers, bare, "o:", color=BARE, label="bare relay, x1, p50")
    _finish(axes, workers, "ms", "Time to the first token, less prefill", LATENCY_MS)


def _draw_requests(axes: Any, scales: Sequence[Scale], decided: Sequence[Decisions]) -> None:
    workers = [scale.router.num_workers for scale in scales]
    axes.plot(workers, [median(s.router.request_us) for s in scales], "o-", color=OURS, label="request")
    bare = [median(scale.control.request_us) for scale in scales]
    axes.plot(workers, bare, "o:", color=BARE, label="request, bare relay")
    line = [(each.num_workers, each.p50_us) for each in decided]
    if line:
        axes.plot(*zip(*line, strict=True), "o-", color=DECIDES, label="decision")
    axes.axhline(DECISION_US, color=DECIDES, linestyle=":", linewidth=1)
    axes.set(yscale="log")
    _finish(axes, workers, "us of a core", "CPU per request", REQUEST_US, from_zero=False)


def _draw_tokens(axes: Any, scales: Sequence[Scale]) -> None:
    workers = [scale.router.num_workers for scale in scales]
    axes.plot(workers, [median(s.router.token_us) for s in scales], "o-", color=OURS, label="router")
    bare = [median(scale.control.token_us) for scale in scales]
    axes.plot(workers, bare, "o:", color=BARE, label="bare relay")
    _finish(axes, workers, "us of a core", "CPU per token", None)


def _finish(
    axes: Any, workers: Sequence[int], unit: str, title: str, budget: float | None, *, from_zero: bool = True
) -> None:
    if budget is not None:
        axes.axhline(budget, color="tab:red", linestyle=":", label="budget")
    axes.set(xscale="log", xlabel="workers", ylabel=unit, title=title)
    axes.set_xticks(workers, [str(count) for count in workers])
    axes.minorticks_off()
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")
