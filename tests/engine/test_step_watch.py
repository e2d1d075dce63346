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
        ([], 9.0),
        ([0.1] * 7, 9.0),
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
    watch = watch_after([0.1])
    assert not watch.is_wedged(1e9)
    assert not watch.is_given_up(1e9)


def test_a_stuck_step_is_given_up_thirty_seconds_later() -> None:
    watch = watch_after([0.1] * 8)
    watch.begin(50.0)
    assert not watch.is_given_up(50.0 + 2.0 + 29.99)
    assert watch.is_given_up(50.0 + 2.0 + 30.01)
    watch.end(90.0)
    assert not watch.is_given_up(1000.0)


def test_work_that_nobody_looks_at_is_a_loop_that_is_stuck() -> None:
    watch = StepWatch()
    watch.woken(100.0)
    watch.woken(108.0)
    assert not watch.is_wedged(108.9)
    assert watch.is_wedged(109.1)
    assert not watch.is_given_up(138.9)
    assert watch.is_given_up(139.1)
    watch.looked()
    assert not watch.is_wedged(1000.0)


def test_work_that_comes_during_a_step_waits_from_its_end() -> None:
    watch = watch_after([5.0] * 8)
    watch.begin(100.0)
    watch.woken(101.0)
    watch.end(114.0)
    assert not watch.is_wedged(122.9)
    assert watch.is_wedged(123.1)
