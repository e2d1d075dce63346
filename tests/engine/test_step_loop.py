"""The step loop: sleeps without work, wakes for it, and ends with what a step raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from baton.limits import Limits
from engine.batch import ForwardBatch, StepOutput
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.events import ChunkComputed, Event, TokenSampled
from engine.scheduler import Scheduler
from engine.step_loop import StepLoop
from engine.step_runner import OnLayers
from engine.stored import DONE
from tests.engine.tiny_models import make_request

GUARD_S = 5


class CountingScheduler(Scheduler):
    num_asked = 0

    def next_batch(self) -> ForwardBatch | None:
        self.num_asked += 1
        return super().next_batch()


class SteppedRunner:
    """Runs a step when a test allows it; tells whoever watches of two layers, both at once, as it begins."""

    def __init__(self) -> None:
        self.watched: list[bool] = []
        self.started: asyncio.Queue[ForwardBatch] = asyncio.Queue()
        self.results: asyncio.Queue[int | Exception] = asyncio.Queue()

    async def execute(self, batch: ForwardBatch, on_layers: OnLayers | None = None) -> StepOutput:
        self.watched.append(on_layers is not None)
        self.started.put_nowait(batch)
        if on_layers is not None:
            on_layers(2, DONE)
        result = await self.results.get()
        if isinstance(result, Exception):
            raise result
        count = len(batch.logits_rows)
        return StepOutput(
            step_id=batch.step_id,
            token_ids=np.full(count, result, np.int64),
            logprobs=np.zeros(count, np.float32),
            finite=np.ones(count, np.bool_),
        )


class Rig:
    def __init__(
        self, handle: Callable[[list[Event]], None] | None = None, on_layers: OnLayers | None = None
    ) -> None:
        self.pool = BlockPool(16, 4)
        self.scheduler = CountingScheduler(
            self.pool,
            Limits(max_model_len=100, vocab_size=100),
            config=EngineConfig(block_size=4, max_batch_tokens=64, chunk_tokens=8, max_running=4),
        )
        self.runner = SteppedRunner()
        self.events: list[Event] = []
        self.loop = StepLoop(self.scheduler, self.runner, handle or self.events.extend, on_layers=on_layers)

    async def started(self) -> ForwardBatch:
        async with asyncio.timeout(GUARD_S):
            return await self.runner.started.get()


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(rig.loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_without_work_it_sleeps_and_never_polls() -> None:
    rig = Rig()
    async with running(rig):
        await turns()
        assert rig.scheduler.num_asked == 1
        await turns()
        assert rig.scheduler.num_asked == 1


async def test_it_wakes_for_work_and_sleeps_again_after_it() -> None:
    rig = Rig()
    request = make_request(list(range(12)), prefill_only=True)
    async with running(rig):
        await turns()
        rig.scheduler.add(request)
        rig.loop.wake()
        assert (await rig.started()).num_tokens == 8
        rig.runner.results.put_nowait(0)
        assert (await rig.started()).num_tokens == 4
        rig.runner.results.put_nowait(42)
        await turns()
        assert rig.events == [ChunkComputed(request), TokenSampled(request, 42, 0.0)]
        asked = rig.scheduler.num_asked
        await turns()
        assert rig.scheduler.num_asked == asked


async def test_a_wake_without_work_is_harmless() -> None:
    rig = Rig()
    async with running(rig) as task:
        await turns()
        rig.loop.wake()
        await turns()
        assert rig.scheduler.num_asked == 2
        assert not task.done()


async def test_a_wake_during_a_step_is_not_lost() -> None:
    rig = Rig()
    first = make_request([1, 2, 3], number=1, prefill_only=True)
    second = make_request([4, 5], number=2, prefill_only=True)
    async with running(rig):
        rig.scheduler.add(first)
        await rig.started()
        rig.scheduler.add(second)
        rig.loop.wake()
        rig.runner.results.put_nowait(7)
        assert (await rig.started()).token_ids.tolist() == [4, 5]


async def test_one_step_is_in_flight_at_a_time() -> None:
    rig = Rig()
    async with running(rig):
        rig.scheduler.add(make_request([1, 2, 3], number=1))
        await rig.started()
        for number in (2, 3):
            rig.scheduler.add(make_request([1, 2], number=number))
            rig.loop.wake()
        await turns()
        assert rig.runner.started.empty()


@pytest.mark.parametrize("error", [RuntimeError("device lost"), ValueError("bad shape")])
async def test_a_failing_step_ends_the_loop_with_its_error(error: Exception) -> None:
    rig = Rig()
    async with running(rig) as task:
        rig.scheduler.add(make_request([1, 2, 3]))
        await rig.started()
        rig.runner.results.put_nowait(error)
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([task])
        assert task.exception() is error
        assert rig.events == []


async def test_a_failing_handler_ends_the_loop() -> None:
    def handle(events: list[Any]) -> None:
        raise KeyError("attempt")

    rig = Rig(handle)
    async with running(rig) as task:
        rig.scheduler.add(make_request([1, 2, 3]))
        await rig.started()
        rig.runner.results.put_nowait(1)
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([task])
        assert isinstance(task.exception(), KeyError)


async def test_only_steps_that_complete_a_prompt_are_watched() -> None:
    told: list[tuple[int, list[bytes]]] = []

    def on_layers(num_layers: int, _stored: object) -> None:
        told.append((num_layers, [request.attempt_id for request in rig.scheduler.completing]))

    rig = Rig(on_layers=on_layers)
    prompt = make_request(list(range(12)), number=1, prefill_only=True)
    async with running(rig):
        rig.scheduler.add(prompt)
        for _ in range(2):
            await rig.started()
            rig.runner.results.put_nowait(5)
        await turns()
        rig.scheduler.add(make_request([1, 2, 3], number=2))
        rig.loop.wake()
        for _ in range(2):
            await rig.started()
            rig.runner.results.put_nowait(6)
        await turns()
    # Two chunks of the prompt, then a prompt that decodes here and its second token.
    assert rig.runner.watched[:4] == [False, True, False, False]
    assert told == [(2, [prompt.attempt_id])]


async def test_without_anybody_who_watches_no_step_is() -> None:
    rig = Rig()
    async with running(rig):
        rig.scheduler.add(make_request([1, 2, 3], prefill_only=True))
        await rig.started()
    assert rig.runner.watched == [False]


async def test_what_the_watcher_raises_ends_the_loop() -> None:
    def on_layers(_num_layers: int, _stored: object) -> None:
        raise KeyError("transfer")

    rig = Rig(on_layers=on_layers)
    async with running(rig) as task:
        rig.scheduler.add(make_request([1, 2, 3], prefill_only=True))
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([task])
        assert isinstance(task.exception(), KeyError)
        assert rig.events == []
