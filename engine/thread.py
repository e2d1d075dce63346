"""The engine thread: where the model is loaded and where every step runs.

The event loop hands over one batch at a time and awaits the result; the thread sleeps on
its queue in between. torch's intra-op pool belongs to the thread that uses it, which is
why the model is built on this thread too. Knows no requests and no network.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from engine.batch import ForwardBatch, StepOutput
from engine.fulfil import fulfil
from engine.layer_relay import LayerRelay
from engine.step_runner import OnLayers

ResultT = TypeVar("ResultT")


class Runner(Protocol):
    """What runs a step on the thread: engine.runner.ModelRunner, or a test's fake."""

    def run(self, batch: ForwardBatch, stored: OnLayers | None = None) -> StepOutput:
        """Runs one step; stored: called on the thread as the layers come to hold the step's KV."""


class EngineThread:
    """A StepRunner that runs on its own thread; made by `await EngineThread.start(factory)`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # A daemon, so that a wedged device cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._runner: Runner | None = None
        self._closed = False
        self._thread.start()

    @classmethod
    async def start(cls, factory: Callable[[], Runner]) -> EngineThread:
        """Builds the runner on a new thread; raises whatever the factory raises, leaving no thread."""
        engine = cls()
        try:
            engine._runner = await engine.call(factory)
        except BaseException:
            engine._stop()
            raise
        return engine

    @property
    def runner(self) -> Runner:
        """What the factory made. Its methods may be called on the engine thread only."""
        assert self._runner is not None, "start() returns after the factory has"
        return self._runner

    async def execute(self, batch: ForwardBatch, on_layers: OnLayers | None = None) -> StepOutput:
        """Runs one step; whatever it, or on_layers, raises reaches the caller."""
        runner = self.runner
        if on_layers is None:
            return await self.call(lambda: runner.run(batch))
        relay = LayerRelay(on_layers, asyncio.get_running_loop().call_soon_threadsafe)
        try:
            # The loop runs what threads hand it in their order: the news first, then what ends this wait.
            output = await self.call(lambda: runner.run(batch, relay.stored))
        finally:
            relay.close()
        if relay.error is not None:
            raise relay.error
        return output

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Runs a function on the engine thread, after what was queued before it.

        Cancelling the caller does not stop a function that has begun.
        """
        if self._closed:
            raise RuntimeError("the engine thread is closed")
        future: Future[ResultT] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    async def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread after what is queued; idempotent. Waits for it without blocking the loop.

        timeout_s: longest wait, in seconds; a thread that is stuck ends with the process.
        """
        self._stop()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function = item
            fulfil(future, function)
