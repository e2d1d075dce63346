"""Watching processes from outside: what is sampled, and how a slope is found."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from benchmarks.process_watch import ProcessWatch, Sample, changes, slope_per_min


def samples(*points: tuple[float, float]) -> list[Sample]:
    return [Sample(at=at, pid=1, rss_mib=rss_mib, num_fds=3, num_threads=2) for at, rss_mib in points]


@pytest.mark.parametrize(
    ("points", "slope"),
    [
        (samples((0, 100), (30, 101), (60, 102)), 2.0),
        (samples((100, 50), (160, 50)), 0.0),
        # By hand: mean 10 and 4; (-10 * -4 + 0 * 2 + 10 * 2) / 200 per second.
        (samples((0, 0), (10, 6), (20, 6)), 18.0),
    ],
)
def test_the_slope_is_that_of_least_squares(points: list[Sample], slope: float) -> None:
    assert slope_per_min(points) == pytest.approx(slope)


async def test_it_samples_at_the_begin_and_at_the_end_and_skips_who_is_gone() -> None:
    found = {"me": os.getpid(), "gone": 2**22 - 7}

    async def find() -> dict[str, int]:
        return found

    async with ProcessWatch(find, every_s=3600.0) as watch:
        await watch.look()
    assert set(watch.samples) == {"me"}
    first, last = watch.samples["me"][0], watch.samples["me"][-1]
    assert first.at < last.at
    assert watch.peak_rss_mib()["me"] == max(first.rss_mib, last.rss_mib)
    assert first.rss_mib == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.2)
    assert changes([watch]) == {}


async def test_whoever_dies_is_named_whether_or_not_another_has_its_name() -> None:
    found = {"me": os.getpid(), "child": os.getpid(), "other": os.getppid()}

    async def find() -> dict[str, int]:
        return found

    watch = ProcessWatch(find, every_s=3600.0)
    await watch.look()
    found["child"] = os.getppid()
    del found["other"]
    await watch.look()
    assert changes([watch]) == {
        "child": f"child has been processes {[os.getpid(), os.getppid()]}",
        "other": "other was not there at the first or the last look",
    }


async def test_who_cannot_be_found_is_no_silence() -> None:
    async def find() -> dict[str, int]:
        raise KeyError("pool")

    with pytest.raises(KeyError, match="pool"):
        async with ProcessWatch(find, every_s=3600.0):
            await asyncio.sleep(0)
