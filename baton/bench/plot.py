"""The picture of a run: how latencies are distributed, and how requests went over time.

Owns the drawing only. matplotlib is not part of any extra: whoever wants the picture installs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from baton.bench.report import LATENCIES, Report

_TITLES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E"}


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def draw(report: Report, title: str, path: Path) -> None:
    """Writes the picture; the file's ending says which kind. Raises ValueError for one that cannot be."""
    import matplotlib as mpl  # noqa: PLC0415 - not part of any extra

    mpl.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot  # noqa: PLC0415 - after the backend is chosen

    figure, axes = pyplot.subplots(1, 4, figsize=(18, 4.2), layout="constrained")
    for name, axis in zip(LATENCIES, axes[:3], strict=True):
        _draw_distribution(axis, report, name)
    _draw_course(axes[3], report)
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_distribution(axis: Any, report: Report, name: str) -> None:
    """The share of values that are at most as large as x."""
    values = sorted(report.latencies(name))
    shares = [(index + 1) / len(values) for index in range(len(values))]
    axis.plot(values, shares, drawstyle="steps-post")
    limit = None if report.slo is None else getattr(report.slo, name)
    if limit is not None:
        axis.axvline(limit, color="tab:red", linestyle=":", label="objective")
        axis.legend()
    axis.set(xlabel="ms", ylabel="share", title=_TITLES[name], ylim=(0, 1.02))
    axis.grid(alpha=0.3)


def _draw_course(axis: Any, report: Report) -> None:
    """TTFT of each request over when it was due; those that failed at the bottom."""
    complete = report.complete
    failed = [outcome.due_s for outcome in report.outcomes if not outcome.is_complete]
    axis.plot([o.due_s for o in complete], [1000 * o.ttft_s for o in complete], ".", label="answered")
    if failed:
        axis.plot(failed, [0.0] * len(failed), "x", color="tab:red", label="failed")
    axis.set(xlabel="due, s", ylabel="TTFT, ms", title="Course of the run")
    axis.legend()
    axis.grid(alpha=0.3)
