"""The rows of a sweep: ours beside the best control and the unchunked one.

Arithmetic over windows that are measured; it measures nothing. Latencies are compared at the middle rate, as
medians over the windows there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.attainment import CLASSES, Window, goodput, pooled
from benchmarks.goodput_sides import Side
from benchmarks.goodput_sweep import Sweep
from benchmarks.report import Row

GOODPUT_TARGET = 1.2
WORST_ITL_TARGET = 5.0
Metric = Callable[[Window], float | None]


def rows(sweep: Sweep) -> list[Row]:
    """Goodput, then latencies at the middle rate, of ours beside controls; then every control's goodput."""
    plan = sweep.plan
    best = _best_control(sweep)
    found = [_goodput_row(sweep, product, best) for product in plan.products]
    for product in plan.products:
        found += [_worst_itl_row(sweep, product, side) for side in plan.controls if side.is_unchunked]
        found += [_latency_row(sweep, product, best, *metric) for metric in METRICS]
    for name in sweep.goodputs:
        if name not in {product.name for product in plan.products}:
            found.append(_control_row(sweep, name))
    return found


METRICS: tuple[tuple[str, Metric], ...] = (
    ("ttft of short prompts p90", lambda window: window.ttft_ms(90, CLASSES["short"])),
    ("ttft p90", lambda window: window.ttft_ms(90)),
    ("itl p99", lambda window: window.itl_ms(99)),
)


def at_middle(sweep: Sweep, side: str, metric: Metric) -> list[float]:
    """The metric of the side's windows at the middle rate, those left out that controls were chosen by."""
    found = [
        metric(w)
        for w in sweep.windows
        if w.side == side and w.rate == sweep.plan.rate and w.round_number > 0
    ]
    return [value for value in found if value is not None]


def facts(sweep: Sweep) -> dict[str, object]:
    """For the record: how it was measured, and every window."""
    plan = sweep.plan
    sides = [*plan.products, *plan.controls]
    return {
        "workload": sweep.workload.name,
        "cv": None if sweep.workload.trace else sweep.workload.cv,
        "model": sweep.model,
        "seed": plan.seed,
        "window_s": round(plan.window_s, 1),
        "rates": [round(rate, 4) for rate in plan.rates],
        "objectives": {
            "ttft_base_s": plan.objectives.ttft_base_s,
            "ttft_per_token_s": plan.objectives.ttft_per_token_s,
            "mean_itl_s": plan.objectives.mean_itl_s,
        },
        "bounds": {"max_in_flight": plan.bounds.max_in_flight, "deadline_s": plan.bounds.deadline_s},
        "sides": {side.name: {"cluster": dict(side.cluster), **side.tables} for side in sides},
        "goodput_by_round": sweep.goodputs,
        "goodput_beyond_the_rates": [
            name
            for name, values in sweep.goodputs.items()
            if not min(values) or max(values) == plan.rates[-1]
        ],
        "goodput_pooled": {side.name: goodput(pooled(_of(sweep.windows, side))) for side in sides},
        "windows": [window.facts() for window in sweep.windows],
    }


def _of(windows: Sequence[Window], side: Side) -> list[Window]:
    return [window for window in windows if window.side == side.name and window.round_number > 0]


def _best_control(sweep: Sweep) -> str | None:
    searched = [side.name for side in sweep.plan.controls if side.name in sweep.goodputs]
    return max(searched, key=lambda name: median(sweep.goodputs[name]), default=None)


def _goodput_row(sweep: Sweep, product: Side, best: str | None) -> Row:
    values = sweep.goodputs[product.name]
    ours, theirs = median(values), None if best is None else median(sweep.goodputs[best])
    return Row(
        metric=f"{sweep.workload.name}: goodput {product.name}",
        unit="/s",
        ours=ours,
        runs=len(values),
        peer=theirs,
        peer_name=best,
        ratio=ours / theirs if theirs else None,
        target=GOODPUT_TARGET,
    )


def _control_row(sweep: Sweep, name: str) -> Row:
    values = sweep.goodputs[name]
    metric = f"{sweep.workload.name}: goodput {name}"
    return Row(metric=metric, unit="/s", ours=median(values), runs=len(values))


def _worst_itl_row(sweep: Sweep, product: Side, unchunked: Side) -> Row:
    row = _latency_row(sweep, product, unchunked.name, "worst itl", lambda window: window.itl_ms(100))
    return replace(row, target=WORST_ITL_TARGET)


def _latency_row(sweep: Sweep, product: Side, peer: str | None, name: str, metric: Metric) -> Row:
    ours = at_middle(sweep, product.name, metric)
    theirs = [] if peer is None else at_middle(sweep, peer, metric)
    is_compared = bool(ours and theirs)
    return Row(
        metric=f"{sweep.workload.name} at {sweep.plan.rate:g}/s: {name} {product.name}",
        unit="ms",
        ours=median(ours) if ours else None,
        runs=len(ours),
        peer=median(theirs) if theirs else None,
        peer_name=peer,
        ratio=median(theirs) / median(ours) if is_compared else None,
    )
