"""The picture of a sweep: the frontier of TTFT and ITL at one rate, and attainment over the rate.

Owns the drawing only. matplotlib is installed for development and imported nowhere else.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

from benchmarks.attainment import ATTAINMENT, pooled
from benchmarks.goodput_rows import at_middle
from benchmarks.goodput_sides import Side
from benchmarks.goodput_sweep import Sweep

# Controls of one shape are one line, from the smallest chunk to the whole prompt.
COLORS = {"2 x 1 thread": "tab:orange", "1 x 2 threads": "tab:purple"}
PRODUCT_COLORS = {"disaggregated": "tab:blue", "auto": "tab:green"}


def draw(sweep: Sweep, path: Path) -> Path:
    """Writes the SVG file and returns its path."""
    mpl.use("svg")
    # The same figures make the same file, but for the date.
    mpl.rcParams["svg.hashsalt"] = "baton"
    from matplotlib import pyplot  # noqa: PLC0415 - after the backend is chosen

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    _draw_frontier(left, sweep)
    _draw_attainment(right, sweep)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def color(side: Side) -> str:
    """A side's color."""
    return next((c for shape, c in COLORS.items() if shape in side.name), PRODUCT_COLORS.get(side.name, "k"))


def _draw_frontier(axes: Any, sweep: Sweep) -> None:
    for shape, shape_color in COLORS.items():
        points = [_point(sweep, side) for side in sweep.plan.controls if shape in side.name]
        known = [point for point in points if point is not None]
        if known:
            ttft, itl, labels = zip(*known, strict=True)
            axes.plot(ttft, itl, "o--", color=shape_color, label=f"colocated {shape}")
            for x, y, label in zip(ttft, itl, labels, strict=True):
                axes.annotate(label, (x, y), fontsize="x-small", xytext=(4, 4), textcoords="offset points")
    for side in sweep.plan.products:
        point = _point(sweep, side)
        if point is not None:
            axes.plot(*point[:2], "*", markersize=14, color=color(side), label=side.name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="TTFT p90, ms",
        ylabel="worst ITL, ms",
        title=f"{sweep.workload.name} at {sweep.plan.rate:g} requests/s",
    )
    axes.legend(fontsize="x-small")


def _point(sweep: Sweep, side: Side) -> tuple[float, float, str] | None:
    ttft = at_middle(sweep, side.name, lambda window: window.ttft_ms(90))
    itl = at_middle(sweep, side.name, lambda window: window.itl_ms(100))
    if not ttft or not itl:
        return None
    return median(ttft), median(itl), side.name.rpartition(", ")[2]


def _draw_attainment(axes: Any, sweep: Sweep) -> None:
    searched = [s for s in (*sweep.plan.products, *sweep.plan.controls) if s.name in sweep.goodputs]
    for side, marker in zip(searched, cycle("os^Dv")):
        shares = pooled([window for window in sweep.windows if window.side == side.name])
        rates = sorted(shares)
        style = "--" if side.is_control else "-"
        axes.plot(
            rates, [shares[rate] for rate in rates], f"{marker}{style}", color=color(side), label=side.name
        )
    axes.axhline(ATTAINMENT, color="tab:red", linestyle=":", label=f"{100 * ATTAINMENT:g} %")
    axes.set(xlabel="requests/s", ylabel="share that met both objectives", title="Attainment", ylim=(0, 1.02))
    axes.legend(fontsize="x-small")
