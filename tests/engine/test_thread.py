"""The engine thread: results, errors and its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from engine.batch import ForwardBatch, StepOutput
from engine.runner import _dummy_batch
from engine.step_runner import OnLayers
from engine.stored import DONE
from engine.thread import EngineThread
from tests.engine.test_scheduler import output_of


class FakeRunner:
    """Runs a step by recording its thread; waits for `gate` if there is one.

    before, after: the numbers of layers that it tells of before and after the gate.
    """

    def __init__(
        self,
        error: Exception | None = None,
        gate: threading.Event | None = None,
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        self.made_on = threading.get_ident()
        self.ran_on: list[int] = []
        self.begun = threading.Event()
        self._error = error
        self._gate = gate
        self._before, self._after = before, after
        self.watched: list[bool] = []

    def run(self, batch: ForwardBatch, stored: OnLayers | None = None) -> StepOutput:
        self.ran_on.append(threading.get_ident())
        self.watched.append(stored is not None)
        self._tell(stored, self._before)
        self.begun.set()
        if self._gate is not None:
            assert self._gate.wait(10)
        self._tell(stored, self._after)
        if self._error is not None:
            raise self._error
        return output_of(batch, [5])

    def _tell(self, stored: OnLayers | None, layers: Sequence[int]) -> None:
        if stored is not None:
            for num_layers in layers:
                stored(num_layers, DONE)


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


async def test_closing_gives_up_on_a_step_that_never_ends() -> None:
    gate = threading.Event()
    engine = await EngineThread.start(lambda: FakeRunner(gate=gate))
    step = asyncio.create_task(engine.execute(_dummy_batch(4)))
    await asyncio.to_thread(engine.runner.begun.wait, 10)  # type: ignore[attr-defined]
    await engine.close(0.01)
    assert not step.done()
    gate.set()
    assert (await step).token_ids.tolist() == [5]


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


class Listener:
    """An OnLayers that notes what it hears, on which thread, and when `heard` that anything has come."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.threads: set[int] = set()
        self.heard = asyncio.Event()

    def __call__(self, num_layers: int, _stored: object) -> None:
        self.told.append(num_layers)
        self.threads.add(threading.get_ident())
        self.heard.set()


async def settled(engine: EngineThread) -> None:
    """Returns once the thread is idle and all that it handed to the loop has run."""
    await engine.call(lambda: None)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_layers_are_told_of_on_the_loop_while_the_step_runs() -> None:
    gate, listener = threading.Event(), Listener()
    engine = await EngineThread.start(lambda: FakeRunner(gate=gate, before=[3], after=[4]))

    step = asyncio.create_task(engine.execute(_dummy_batch(4), listener))
    async with asyncio.timeout(10):
        await listener.heard.wait()
    assert (listener.told, step.done()) == ([3], False)
    gate.set()
    await step

    assert listener.told == [3, 4]
    assert listener.threads == {threading.get_ident()}
    await engine.close()


async def test_layers_come_in_order_and_all_before_the_step_returns() -> None:
    engine = await EngineThread.start(lambda: FakeRunner(before=range(1, 31)))
    for _ in range(300):
        listener = Listener()
        await engine.execute(_dummy_batch(4), listener)
        told = list(listener.told)
        assert told == sorted(set(told))
        assert told[-1] == 30
        await settled(engine)
        assert listener.told == told
    await engine.close()


async def test_a_step_that_nobody_watches_is_run_without_a_callback() -> None:
    engine = await EngineThread.start(FakeRunner)
    await engine.execute(_dummy_batch(4))
    await engine.execute(_dummy_batch(4), Listener())
    assert engine.runner.watched == [False, True]  # type: ignore[attr-defined]
    await engine.close()


async def test_layers_before_an_error_are_told_of_and_none_after_it() -> None:
    engine = await EngineThread.start(lambda: FakeRunner(error=ZeroDivisionError("boom"), before=[1, 2]))
    listener = Listener()

    with pytest.raises(ZeroDivisionError, match="boom"):
        await engine.execute(_dummy_batch(4), listener)

    assert listener.told[-1] == 2
    told = list(listener.told)
    await settled(engine)
    assert listener.told == told
    await engine.close()


async def test_a_caller_that_gave_up_hears_of_no_more_layers() -> None:
    gate, listener = threading.Event(), Listener()
    engine = await EngineThread.start(lambda: FakeRunner(gate=gate, before=[1], after=[2, 3]))
    step = asyncio.create_task(engine.execute(_dummy_batch(4), listener))
    async with asyncio.timeout(10):
        await listener.heard.wait()

    step.cancel()
    await asyncio.wait([step])
    gate.set()
    await settled(engine)

    assert listener.told == [1]
    await engine.close()


async def test_what_the_listener_raises_reaches_the_caller_after_the_step() -> None:
    def fail(num_layers: int, _stored: object) -> None:
        heard.append(num_layers)
        raise KeyError("transfer")

    heard: list[int] = []
    engine = await EngineThread.start(lambda: FakeRunner(before=range(1, 31)))

    with pytest.raises(KeyError, match="transfer"):
        await engine.execute(_dummy_batch(4), fail)

    assert len(heard) == 1
    assert (await engine.execute(_dummy_batch(4))).token_ids.tolist() == [5]
    await engine.close()
