"""The peak of goodput: which of the probed rates it is, and when there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from baton import AsyncClient
from baton.errors import InternalError
from benchmarks.attainment import Objectives
from benchmarks.overload import MAX_PROBES, STEP, ObjectiveTarget, Overload
from benchmarks.workload import MIXES, Workload

FIRST_RATE = 2.0


async def peak_of(curve: Callable[[float], float]) -> tuple[float, int]:
    """The peak where goodput is this of the rate, and how many rates were probed."""
    probed: list[float] = []

    class Told(Overload):
        async def goodput(self, rate: float, seed: int) -> float:
            del seed
            probed.append(rate)
            return curve(rate)

    objectives = Objectives()
    told = Told(
        target=ObjectiveTarget(cast("AsyncClient", None), objectives),
        workload=Workload(mix=MIXES["80/15/5"], vocab_size=259),
        objectives=objectives,
        seconds=1.0,
        first_rate=FIRST_RATE,
    )
    try:
        return await told.peak(), len(probed)
    finally:
        assert len(probed) <= MAX_PROBES


async def test_the_peak_is_followed_by_two_rates_that_are_no_better() -> None:
    peak, num_probes = await peak_of(lambda rate: min(rate, 12.0 - rate))
    assert peak == pytest.approx(FIRST_RATE * STEP**3)
    assert num_probes == 6


async def test_of_rates_that_are_all_as_good_it_is_the_lowest() -> None:
    assert await peak_of(lambda _rate: 3.0) == (FIRST_RATE, 3)


@pytest.mark.parametrize(("curve", "words"), [(lambda _rate: 0.0, "no request met"), (float, "still grows")])
async def test_a_peak_that_is_not_there_is_not_looked_for_for_ever(
    curve: Callable[[float], float], words: str
) -> None:
    with pytest.raises(InternalError, match=words):
        await peak_of(curve)
