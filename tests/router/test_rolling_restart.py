"""Rolling restarts of workers under load, in simulated time: no request fails, none is counted as failed."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fakes import until
from tests.router.acting import ActingDecode, ActingPrefill, Company, Manners, token_at, virtually
from tests.router.stage import Run, Stage, staged
from tests.router.test_cases_routing import counters, ends

GRACE_S = 2.0
# From the end of a process until the next one of its name serves.
RESTART_S = 4.0
# Most answers end within the grace time; some take three times as long.
STEP_S = 0.02
NUM_TOKENS = (1, 2, 20, 40, 300)


async def restarted(company: Company, worker: ActingPrefill | ActingDecode) -> None:
    await company.leave(worker, grace_s=GRACE_S)
    await asyncio.sleep(RESTART_S)
    if isinstance(worker, ActingPrefill):
        await company.prefill(worker.identity.name)
    else:
        await company.decode(worker.identity.name, num_blocks=worker.num_blocks)


async def load(stage: Stage, rng: random.Random, runs: list[tuple[Run, int]]) -> None:
    """Requests that come until cancelled."""
    while True:
        num_tokens = rng.choice(NUM_TOKENS)
        runs.append((stage.generate(rng.randrange(1, 400), max_tokens=num_tokens), num_tokens))
        await asyncio.sleep(rng.expovariate(15))


@pytest.mark.parametrize(
    ("mode", "num_each"),
    [("disaggregated", 2), ("auto", 2), ("colocated", 2), ("disaggregated", 1)],
    ids=["disaggregated", "auto", "colocated", "one-of-each"],
)
def test_a_rolling_restart_of_all_workers_fails_nobody(mode: str, num_each: int) -> None:
    async def main() -> tuple[int, list[str]]:
        async with staged(placement=mode, max_attempts=1, max_queue=1000, resume_wait_s=10.0) as stage:
            company = Company(stage, Manners(step_s=STEP_S))
            present: list[ActingPrefill | ActingDecode] = []
            for number in range(num_each):
                present.append(await company.prefill(f"prefill-{number}"))
                present.append(await company.decode(f"decode-{number}", num_blocks=2000))
            runs: list[tuple[Run, int]] = []
            loading = asyncio.create_task(load(stage, random.Random(5), runs))
            await asyncio.sleep(3)
            for worker in present:
                await restarted(company, worker)
                await asyncio.sleep(1)
            loading.cancel()
            async with asyncio.timeout(60):
                for run, num_tokens in runs:
                    assert await ends(run) == "finished"
                    assert run.received() == [token_at(index) for index in range(num_tokens)]
            timelines = [run.generation._timeline for run, _ in runs]
            assert {timeline.num_attempts for timeline in timelines} == {1}
            assert stage.dispatcher.retries._left == stage.dispatcher.retries._capacity
            assert all(link.breaker._num_failures == 0 for link in stage.fleet.links)
            await until(lambda: not any(any(counts) for counts in counters(stage).values()))
            assert {link.state for link in stage.fleet.links} == {"ready"}
            return len(runs), [
                attempt.outcome for timeline in timelines for attempt in timeline.explain.attempts
            ]

    num_requests, outcomes = virtually(main())
    assert num_requests > 200
    assert set(outcomes) == {"OK", "DRAINING"}
    # Each was handed over at most once by each of the workers that it met.
    assert 5 < outcomes.count("DRAINING") < num_requests


def test_a_worker_that_is_left_before_its_grace_time_ends_goes_early() -> None:
    async def main() -> float:
        async with staged() as stage:
            company = Company(stage, Manners(step_s=STEP_S))
            await company.prefill("prefill-0")
            leaving = await company.decode("decode-0")
            run = stage.generate(max_tokens=11)
            await until(lambda: len(run.received()) == 1)
            began = asyncio.get_running_loop().time()
            await company.leave(leaving, grace_s=30.0)
            assert await run.answer() == [token_at(index) for index in range(11)]
            return asyncio.get_running_loop().time() - began

    # Ten tokens were left.
    assert virtually(main()) < 10 * STEP_S + 0.1
