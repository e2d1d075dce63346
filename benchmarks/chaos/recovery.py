"""For which fault an answer waited, and how long.

A wait counts for one fault only: where several touch it, for the one that began last before it, and where all
began later, for the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.chaos.load import Record
from benchmarks.chaos.storm import Strike

# The tokens that were under way when a fault struck arrive after it.
UNDER_WAY_S = 0.1


def recoveries(strikes: Sequence[Strike], records: Sequence[Record]) -> list[float | None]:
    """Per strike the longest wait, in seconds, of an answer that was there and was resumed; or None."""
    longest: list[float | None] = [None] * len(strikes)
    for record in records:
        if not record.was_resumed:
            continue
        there = [index for index, strike in enumerate(strikes) if strike.was_at(record)]
        for begun_at, ended_at in _waits(record):
            cause = _cause(strikes, there, begun_at, ended_at)
            if cause is None:
                continue
            # Before its first token an answer may have waited for its turn; that is not the fault's.
            is_first = begun_at == record.asked_at
            since = max(begun_at, strikes[cause].begun_at) if is_first else begun_at
            longest[cause] = max(longest[cause] or 0.0, ended_at - since)
    return longest


def _waits(record: Record) -> list[tuple[float, float]]:
    """From the question to the first token, or to an end without one, and then from token to token."""
    arrivals = record.arrivals
    first = arrivals[0] if arrivals else record.ended_at
    return [(record.asked_at, first), *pairwise(arrivals)]


def _cause(strikes: Sequence[Strike], there: Sequence[int], begun_at: float, ended_at: float) -> int | None:
    is_over_at = begun_at - UNDER_WAY_S
    touching = [i for i in there if strikes[i].begun_at <= ended_at and strikes[i].lifted_at >= is_over_at]
    before = [i for i in touching if strikes[i].begun_at <= begun_at + UNDER_WAY_S]
    if before:
        return max(before, key=lambda index: strikes[index].begun_at)
    return min(touching, key=lambda index: strikes[index].begun_at, default=None)
