"""What counts as a stuck device, against times written out by hand."""

from __future__ import annotations

import pytest

from engine.step_watch import StepWatch


def watch_after(durations: list[float]) -> StepWatch:
    watch = StepWatch()
    for duration in durations:
        watch.begin(100.0)
        watch.end(100.0 + duration)
    return watch


@pytest.mark.parametrize(
    ("durations", "allowed_s"),
    [
        ([], 10.0),
        ([0.1] * 7, 10.0),
        ([0.1] * 8, 2.0),
        ([0.1] * 7 + [1.5], 4.5),
        ([9.0] + [0.1] * 64, 2.0),
    ],
    ids=["new", "few-steps", "short-steps", "one-long-step", "long-ago"],
)
def test_a_step_may_take_three_times_the_longest_before_it(durations: list[float], allowed_s: float) -> None:
    watch = watch_after(durations)
    assert watch.allowed_s == pytest.approx(allowed_s)
    watch.begin(50.0)
    assert not watch.is_wedged(50.0 + allowed_s - 0.01)
    assert watch.is_wedged(50.0 + allowed_s + 0.01)
    watch.end(50.0 + allowed_s + 0.02)
    assert not watch.is_wedged(1000.0)


def test_an_idle_device_is_not_stuck() -> None:
    assert not StepWatch().is_wedged(1e9)
