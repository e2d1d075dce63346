"""When requests arrive: Poisson, bursty, or as in a trace.

Owns times only, in seconds from the start of a window, not what arrives. A sequence is drawn at a rate of
1/s and then divided by the rate, so that every rate of a sweep sees the same sequence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, takewhile

# Of the bursty arrivals: coefficient of variation of the gaps; a Poisson process has 1.
DEFAULT_CV = 3.0


def poisson_gaps(rng: random.Random) -> Iterator[float]:
    """Exponential gaps of mean 1."""
    while True:
        yield rng.expovariate(1.0)


def bursty_gaps(rng: random.Random, cv: float) -> Iterator[float]:
    """Gamma-distributed gaps of mean 1 and that coefficient of variation.

    A gamma of shape k and scale s has mean k s and variance k s^2: k = 1 / cv^2 and s = cv^2.
    Raises ValueError unless cv is above 1: below, arrivals would be smoother than Poisson's.
    """
    if cv <= 1:
        raise ValueError(f"cv is {cv}; bursty arrivals need more than 1, which is Poisson's")
    while True:
        yield rng.gammavariate(1 / cv**2, cv**2)


def trace_gaps(times_s: Sequence[float]) -> Iterator[float]:
    """The gaps of a trace, scaled to a mean of 1, and once more from the beginning when it has ended.

    times_s: rising. Raises ValueError for fewer than two, or if all are equal.
    """
    if len(times_s) < 2 or times_s[-1] <= times_s[0]:
        raise ValueError("a trace needs at least two requests at different times")
    mean = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    gaps = [(later - earlier) / mean for earlier, later in pairwise(times_s)]
    while True:
        # The first request waits a mean gap, so that a repetition joins on like any other.
        yield 1.0
        yield from gaps


def window(gaps: Iterator[float], rate: float, duration_s: float) -> list[float]:
    """Times in [0, duration_s) of arrivals at `rate` requests/s."""
    return list(takewhile(lambda at: at < duration_s, accumulate(gap / rate for gap in gaps)))
