"""The simulation as a test: many seeds, some of them twice, and every rare event at least once.

A plan that failed once stays in failed_once/ with what it found, for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.kept_plan import kept
from tests.simulation.plan import FAULT_PHASE_S, draw
from tests.simulation.run import report, run
from tests.simulation.seeds import process_pool, shortcomings, simulate

NUM_SEEDS = 300
NUM_LONG_SEEDS = 5_000
KEPT = kept()


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with process_pool() as processes:
        yield processes


def assert_lawful(pool: ProcessPoolExecutor, seeds: range) -> None:
    """No law is broken, each seed has its requests, faults and a resume, and every rare event happens."""
    summary = simulate(pool, seeds)
    print(summary)
    assert not summary.failed, "\n".join(record.report for record in summary.failed)
    assert summary.num_seeds == len(seeds)
    assert summary.never == []


@pytest.mark.timeout(900)
def test_no_law_is_broken_and_every_rare_event_happens(pool: ProcessPoolExecutor) -> None:
    assert_lawful(pool, range(NUM_SEEDS))


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_no_law_is_broken_over_many_seeds(pool: ProcessPoolExecutor) -> None:
    assert_lawful(pool, range(NUM_SEEDS, NUM_LONG_SEEDS))


@pytest.mark.parametrize("name", KEPT)
def test_a_plan_that_failed_once(name: str) -> None:
    result = run(KEPT[name])
    assert not result.defects, report(result)


def test_there_are_plans_that_failed_once() -> None:
    assert {name.partition("-")[0] for name in KEPT} >= {"12", "364", "4038"}


def test_another_seed_is_another_run() -> None:
    assert run(draw(1)).digest != run(draw(2)).digest


def test_faults_last_forty_seconds_and_requests_are_spread_over_them() -> None:
    plan = draw(4)
    times = [request.at for request in plan.requests]
    assert plan.fault_phase_s == FAULT_PHASE_S == 40
    assert len(times) >= 50
    assert (min(times) < 10, max(times) > 30) == (True, True)


def test_a_tame_plan_is_told_from_a_proof() -> None:
    plan = draw(1)
    tame = run(dataclasses.replace(plan, requests=plan.requests[:20], faults=()))
    found = list(shortcomings(tame))
    assert [text.partition(":")[2] for text in found] == [
        " 20 requests, at least 50 are due",
        " 0 faults, at least 3 are due",
        " 0 resumes, at least 1 are due",
    ]


def test_a_fault_left_out_changes_no_request() -> None:
    plan = draw(3)
    assert plan.without(0).requests == plan.requests
    assert len(plan.without(0).faults) == len(plan.faults) - 1
