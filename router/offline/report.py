"""What policies came to, side by side. Owns the figures and their layout, and knows nothing of simulation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from router.offline.recording import Outcome

# (label, least prompt tokens, tokens from which the next begins)
CLASSES = (("<128", 0, 128), ("128-511", 128, 512), (">=512", 512, 1 << 62))
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One policy's outcomes in figures; milliseconds where nothing else is said.

    ttft_ms: percentiles by class and percentage; absent for a class without requests.
    itl_ms: mean gap between tokens over all answers of more than one.
    attainment: share of requests that met both objectives, 0 to 1.
    balance: the busiest computing worker's prefill time over the mean of all; 1 is even.
    """

    policy: str
    num_requests: int
    ttft_ms: dict[str, dict[int, float]]
    itl_ms: float
    attainment: float
    balance: float

    @classmethod
    def of(
        cls, policy: str, outcomes: Sequence[Outcome], *, itl_objective_ms: float, computing: Sequence[str]
    ) -> Figures:
        """computing: names of the workers that prompts are meant to be computed by."""
        gaps = [outcome.itl_ms for outcome in outcomes if outcome.request.num_output_tokens > 1]
        met = [_is_met(outcome, itl_objective_ms) for outcome in outcomes]
        return cls(
            policy=policy,
            num_requests=len(outcomes),
            ttft_ms=_by_class(outcomes),
            itl_ms=fmean(gaps) if gaps else 0.0,
            attainment=fmean(met) if met else 0.0,
            balance=_balance(outcomes, computing),
        )


def table(figures: Iterable[Figures]) -> list[str]:
    """The figures as lines of text: one policy per line."""
    groups = "".join(f"  {'TTFT ms, ' + label:>23}" for label, _, _ in CLASSES)
    percentiles = "".join("  " + "".join(f"{f'p{p}':>8}" for p in PERCENTILES)[1:] for _ in CLASSES)
    lines = [
        f"{'':<15}{groups}",
        f"{'policy':<15}{percentiles}{'ITL ms':>9}{'met':>7}{'balance':>9}",
    ]
    return lines + [_line(row) for row in figures]


def percentile(values: Sequence[float], percentage: float) -> float:
    """The smallest value that at least that percentage of the values do not exceed; nan of none."""
    if not values:
        return math.nan
    rank = max(1, math.ceil(len(values) * percentage / 100))
    return sorted(values)[rank - 1]


def _line(row: Figures) -> str:
    cells = ""
    for label, _, _ in CLASSES:
        own = row.ttft_ms.get(label, {})
        cells += "  " + "".join(f"{_number(own.get(p)):>8}" for p in PERCENTILES)[1:]
    return f"{row.policy:<15}{cells}{row.itl_ms:>9.1f}{row.attainment:>7.1%}{row.balance:>9.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _by_class(outcomes: Sequence[Outcome]) -> dict[str, dict[int, float]]:
    found = {}
    for label, least, end in CLASSES:
        values = [
            outcome.ttft_ms
            for outcome in outcomes
            if outcome.ttft_ms is not None and least <= outcome.request.num_prompt_tokens < end
        ]
        if values:
            found[label] = {p: percentile(values, p) for p in PERCENTILES}
    return found


def _is_met(outcome: Outcome, itl_objective_ms: float) -> bool:
    is_first_met = outcome.ttft_ms is not None and outcome.ttft_ms <= outcome.request.ttft_objective_ms
    return is_first_met and outcome.itl_ms <= itl_objective_ms


def _balance(outcomes: Sequence[Outcome], computing: Sequence[str]) -> float:
    busy_ms: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        busy_ms[outcome.prefill_worker] += outcome.compute_ms
    own = [busy_ms[name] for name in computing]
    return max(own) / fmean(own) if any(own) else 1.0
