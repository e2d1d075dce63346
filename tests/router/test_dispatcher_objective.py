"""A strict objective: refused where the first token would come too late, and by how much it says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from baton.errors import Overloaded
from baton.v1 import common_pb2
from router.assignment import Assignment, Wanted
from tests.fakes import GUARD_S
from tests.router.acting import virtually
from tests.router.stage import NOTHING, Stage, staged

IDS = (number.to_bytes(16, "big") for number in itertools.count(1))
LOW, HIGH = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_HIGH


class Clock:
    """The loop's time, held still, so that what is left until a deadline is exact."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = asyncio.get_running_loop().time()
        patch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


class EqualCosts:
    """1 ms per token to compute, 10 ms a step, nothing else."""

    def prefill_ms(self, worker: int, num_tokens: int, num_cached_tokens: int) -> float:
        del worker, num_cached_tokens
        return float(num_tokens)

    def transfer_ms(self, source: int, target: int, num_tokens: int) -> float:
        del source, target, num_tokens
        return 0.0

    def step_ms(self, worker: int, num_decoding: int, num_context_tokens: int, num_prompt: int = 0) -> float:
        del worker, num_decoding, num_context_tokens, num_prompt
        return 10.0


def with_equal_costs(stage: Stage, patch: pytest.MonkeyPatch) -> None:
    costs: Any = EqualCosts()
    patch.setattr(stage.dispatcher._placement, "_costs", costs)
    for name in ("prefill_ms", "transfer_ms", "step_ms"):
        patch.setattr(stage.core.outlook.costs, name, getattr(costs, name))


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def wanted(num_tokens: int, within_ms: float, *, is_strict: bool = True, **more: Any) -> Wanted:
    now = asyncio.get_running_loop().time()
    facts = {"keys": None, "expected_tokens": num_tokens, "is_strict": is_strict} | more
    return Wanted(
        attempt_id=next(IDS),
        num_tokens=num_tokens,
        kv_tokens=num_tokens + 10,
        arrived_at=now,
        due_at=now + within_ms / 1000,
        **facts,
    )


def assign(stage: Stage, asked: Wanted) -> asyncio.Task[Assignment]:
    return asyncio.create_task(stage.dispatcher.assign(asked))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def refusal(task: asyncio.Task[Assignment]) -> Overloaded:
    with pytest.raises(Overloaded) as refused:
        async with asyncio.timeout(GUARD_S):
            await task
    return refused.value


async def test_an_idle_worker_needs_the_prompts_own_time(patch: pytest.MonkeyPatch) -> None:
    async with staged() as stage:
        await stage.prefill()
        await stage.decode(num_blocks=1000)
        Clock(patch)
        with_equal_costs(stage, patch)
        error = await refusal(assign(stage, wanted(300, within_ms=299)))
        assert "within 299 ms" in error.message
        assert "about 300 ms" in error.message
        assert "ttft_objective_ms" in error.message
        # A millisecond is missing; nobody is asked to come back sooner than in 100.
        assert error.retry_after_s == pytest.approx(0.1)
        taken = await assign(stage, wanted(300, within_ms=301))
        taken.undo()
        assert stage.held() == NOTHING


async def test_the_hint_is_what_is_missing(patch: pytest.MonkeyPatch) -> None:
    async with staged() as stage:
        await stage.prefill()
        await stage.decode(num_blocks=1000)
        Clock(patch)
        with_equal_costs(stage, patch)
        error = await refusal(assign(stage, wanted(2000, within_ms=500)))
        assert error.retry_after_s == pytest.approx(1.5)


async def test_what_waits_and_goes_first_counts_by_the_number_of_those_who_compute(
    patch: pytest.MonkeyPatch,
) -> None:
    async with staged() as stage:
        # Credit for one prompt each, so that others wait.
        await stage.prefill("prefill-0", budget=100)
        await stage.prefill("prefill-1", budget=100)
        await stage.decode(num_blocks=1000)
        Clock(patch)
        with_equal_costs(stage, patch)
        running = [await assign(stage, wanted(100, 60_000, is_strict=False)) for _ in range(2)]
        waiting = [assign(stage, wanted(100, 1000, is_strict=False)) for _ in range(4)]
        await turns()
        assert len(stage.queue) == 4
        # 100 ms of its own, and 100 of what runs there; what waits is due later.
        late = await refusal(assign(stage, wanted(100, within_ms=99)))
        assert "about 200 ms" in late.message
        # Now half of 400 ms more, that are due before.
        early = [assign(stage, wanted(100, 100, is_strict=False)) for _ in range(4)]
        await turns()
        late = await refusal(assign(stage, wanted(100, within_ms=350)))
        assert "about 400 ms" in late.message
        task = assign(stage, wanted(100, within_ms=401))
        await turns()
        assert not task.done()
        for left in (*waiting, *early, task):
            left.cancel()
        await turns()
        for assignment in running:
            assignment.undo()
        assert stage.held() == NOTHING


async def test_those_of_higher_priority_go_first_whenever_they_are_due(patch: pytest.MonkeyPatch) -> None:
    async with staged() as stage:
        await stage.prefill(budget=100)
        await stage.decode(num_blocks=1000)
        Clock(patch)
        with_equal_costs(stage, patch)
        running = await assign(stage, wanted(100, 60_000, is_strict=False))
        waiting = [assign(stage, wanted(100, 60_000, is_strict=False, priority=HIGH)) for _ in range(5)]
        await turns()
        low = await refusal(assign(stage, wanted(100, within_ms=650, priority=LOW)))
        # What runs, five of higher priority, and its own.
        assert "about 700 ms" in low.message
        high = assign(stage, wanted(100, within_ms=650, priority=HIGH))
        await turns()
        assert not high.done()
        for task in (*waiting, high):
            task.cancel()
        await turns()
        running.undo()
        assert stage.held() == NOTHING


@pytest.mark.parametrize(
    "how",
    [pytest.param({"is_strict": False}, id="not strict"), pytest.param({"is_new": False}, id="came before")],
)
async def test_only_new_requests_that_insist_are_refused(
    how: dict[str, Any], patch: pytest.MonkeyPatch
) -> None:
    async with staged() as stage:
        await stage.prefill()
        await stage.decode(num_blocks=1000)
        Clock(patch)
        with_equal_costs(stage, patch)
        taken = await assign(stage, wanted(2000, within_ms=1, **how))
        assert taken.num_uncached_tokens == 2000
        taken.undo()
        assert stage.held() == NOTHING


def test_where_nobody_can_serve_yet_nothing_is_predicted_but_too_late_is_too_late(
    patch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with staged(resume_wait_s=60.0) as stage:
            await stage.decode(num_blocks=1000)
            with_equal_costs(stage, patch)
            task = assign(stage, wanted(2000, within_ms=1))
            await turns()
            assert not task.done()
            await asyncio.sleep(0.0015)
            await stage.prefill()
            assert "sooner than there was a place" in (await refusal(task)).message
            assert stage.held() == NOTHING

    virtually(main())


async def test_in_auto_a_decode_worker_that_is_sooner_counts(patch: pytest.MonkeyPatch) -> None:
    async with staged(placement="auto") as stage:
        await stage.prefill()
        await stage.decode(num_blocks=1000)
        Clock(patch)
        with_equal_costs(stage, patch)
        # 100 ms at the prefill worker; one step of 10 at the decode worker.
        taken = await assign(stage, wanted(100, within_ms=50))
        assert taken.prefill is None
        taken.undo()
        error = await refusal(assign(stage, wanted(100, within_ms=9)))
        assert "about 10 ms" in error.message


async def test_without_prefill_workers_the_decode_workers_share_what_waits(patch: pytest.MonkeyPatch) -> None:
    async with staged(placement="auto") as stage:
        for number in range(2):
            await stage.decode(f"decode-{number}", num_blocks=16)
        Clock(patch)
        with_equal_costs(stage, patch)
        running = [await assign(stage, wanted(200, 60_000, is_strict=False)) for _ in range(2)]
        waiting = [assign(stage, wanted(200, 100, is_strict=False)) for _ in range(4)]
        await turns()
        assert len(stage.queue) == 4
        error = await refusal(assign(stage, wanted(200, within_ms=100)))
        # 800 ms of predicted work wait, for two to do. Then 200 tokens that are being computed, in steps of
        # 10 ms that take 64 of them as they decode as well, and its own in four such steps.
        assert f"about {400 + 10 * 200 / 64 + 40:.0f} ms" in error.message
        for task in waiting:
            task.cancel()
        await turns()
        for assignment in running:
            assignment.undo()
        assert stage.held() == NOTHING
