"""The engine thread: results, errors and its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.batch import ForwardBatch, StepOutput
from engine.runner import _dummy_batch
from engine.thread import EngineThread
from tests.engine.test_scheduler import output_of


class FakeRunner:
    """Runs a step by recording its thread; waits for `gate` if there is one."""

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.made_on = threading.get_ident()
        self.ran_on: list[int] = []
        self.begun = threading.Event()
        self._error = error
        self._gate = gate

    def run(self, batch: ForwardBatch) -> StepOutput:
        self.ran_on.append(threading.get_ident())
        self.begun.set()
        if self._gate is not None:
            assert self._gate.wait(10)
        if self._error is not None:
            raise self._error
        return output_of(batch, [5])


async def test_model_and_steps_share_one_thread_that_is_not_the_loops() -> None:
    engine = await EngineThread.start(FakeRunner)

    output = await engine.execute(_dummy_batch(4))

    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    assert output.token_ids.tolist() == [5]
    assert runner.ran_on == [runner.made_on]
    assert runner.made_on != threading.get_ident()
    await engine.close()


async def test_the_loop_runs_while_a_step_does() -> None:
    gate = threading.Event()
    engine = await EngineThread.start(lambda: FakeRunner(gate=gate))

    step = asyncio.create_task(engine.execute(_dummy_batch(4)))
    await asyncio.to_thread(engine.runner.begun.wait, 10)  # type: ignore[attr-defined]
    assert not step.done()
    gate.set()

    assert (await step).token_ids.tolist() == [5]
    await engine.close()


async def test_an_error_reaches_the_caller_and_the_thread_lives_on() -> None:
    engine = await EngineThread.start(lambda: FakeRunner(error=ZeroDivisionError("boom")))

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="boom"):
            await engine.execute(_dummy_batch(4))
    await engine.close()


async def test_a_failing_factory_leaves_no_thread() -> None:
    def fail() -> FakeRunner:
        raise OSError("no such model")

    before = {thread.ident for thread in threading.enumerate()}
    with pytest.raises(OSError, match="no such model"):
        await EngineThread.start(fail)

    left = [t for t in threading.enumerate() if t.name == "engine" and t.ident not in before]
    for thread in left:
        await asyncio.to_thread(thread.join, 10)
    assert not any(thread.is_alive() for thread in left)


async def test_a_caller_that_gives_up_disturbs_nobody() -> None:
    gate = threading.Event()
    engine = await EngineThread.start(lambda: FakeRunner(gate=gate))
    first = asyncio.create_task(engine.execute(_dummy_batch(4)))
    queued = asyncio.create_task(engine.execute(_dummy_batch(4)))
    await asyncio.to_thread(engine.runner.begun.wait, 10)  # type: ignore[attr-defined]

    first.cancel()
    queued.cancel()
    await asyncio.wait([first, queued])
    gate.set()

    assert (await engine.execute(_dummy_batch(4))).token_ids.tolist() == [5]
    # The queued step was never begun.
    assert len(engine.runner.ran_on) == 2  # type: ignore[attr-defined]
    await engine.close()


async def test_a_closed_engine_refuses_and_closing_twice_is_harmless() -> None:
    engine = await EngineThread.start(FakeRunner)
    await engine.close()
    await engine.close()

    with pytest.raises(RuntimeError, match="closed"):
        await engine.execute(_dummy_batch(4))
