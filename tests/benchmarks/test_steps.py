"""What benchmarks.steps reckons, and that a step of it is one of the engine's."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from benchmarks import steps


def test_the_sum_leaves_sampling_out_and_is_compared_with_its_limit() -> None:
    times = {steps.BATCH: [1e-4, 3e-4, 2e-4], steps.PLAN: [1e-4], steps.SAMPLE: [5.0], steps.TAKE: [3e-4]}
    *parts, whole = steps.rows_of(64, "greedy", times)
    assert [row.ours for row in parts] == pytest.approx([0.2, 0.1, 5000.0, 0.3])
    assert (whole.ours, whole.ratio, whole.target) == (pytest.approx(0.6), pytest.approx(0.5), 1.0)
    *_, without_limit = steps.rows_of(8, "greedy", times)
    assert (without_limit.peer, without_limit.ratio, without_limit.target) == (None, None, None)


@pytest.mark.parametrize("kind", steps.KINDS)
def test_each_part_of_a_step_is_timed_once(kind: str) -> None:
    ticks = itertools.count()
    measured = steps.Steps(3, steps.KINDS[kind], lambda: float(next(ticks)))
    times: steps.Times = defaultdict(list)
    for _ in range(5):
        measured.step(times)
    assert times == {part: [1.0] * 5 for part in (steps.BATCH, steps.PLAN, steps.SAMPLE, steps.TAKE)}
