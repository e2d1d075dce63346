"""Percentiles of measured values."""

from __future__ import annotations

from statistics import quantiles


def percentile(values: list[float], percent: int) -> float:
    """The percentile of at least one value, interpolated."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1] if percent else min(values)
