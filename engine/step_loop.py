"""The loop both workers run: ask the scheduler for a batch, execute it, apply the result.

Lives on the event loop; the model runs wherever the StepRunner runs it. Sleeps
while there is no work, and never polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.batch import ForwardBatch, StepOutput
from engine.events import Event
from engine.scheduler import Scheduler
from engine.step_meter import StepLoad, StepMeter
from engine.step_runner import OnLayers, StepRunner
from engine.step_watch import StepWatch

# Time for a message to leave the process; spent only on requests that are suspected.
ANNOUNCE_S = 0.01


class StepLoop:
    """Drives one scheduler with one runner.

    handle: called with the events of every step, and with those of requests that left before
        it, on the event loop. It owns the blocks of every request that an event says has left.
    announce: called with (attempt_id, ended) around each step that one request has to itself.
    on_layers: called during each step that completes a prompt, one of scheduler.completing, as its layers
        come to hold the KV; see engine/step_runner.py. What it raises ends the loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        handle: Callable[[list[Event]], None],
        announce: Callable[[bytes, bool], None] = lambda _attempt_id, _ended: None,
        on_layers: OnLayers | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._handle = handle
        self._announce = announce
        self._on_layers = on_layers
        self._work = asyncio.Event()
        self._watch = StepWatch()
        self._meter = StepMeter()
        self._load: StepLoad | None = None

    def wake(self) -> None:
        """Says that the scheduler may have work."""
        self._watch.woken(self._now())
        self._work.set()

    async def run(self) -> None:
        """Runs steps until cancelled. A failing step ends the loop, and with it the worker."""
        loop = asyncio.get_running_loop()
        self._scheduler.wake_by(lambda: loop.call_soon_threadsafe(self.wake))
        while True:
            # Before anything looks: what comes from here on wakes the loop again.
            self._work.clear()
            self._watch.looked()
            batch = self._scheduler.next_batch()
            if left := self._scheduler.take_left():
                self._handle(left)
            if batch is None:
                await self._work.wait()
                continue
            self._handle(self._scheduler.apply(await self._execute(batch)))

    async def _execute(self, batch: ForwardBatch) -> StepOutput:
        alone = self._scheduler.alone_in_flight
        if alone is not None:
            self._announce(alone, False)
            # The word must be out before a step that may end the process.
            await asyncio.sleep(ANNOUNCE_S)
        began_at = self._now()
        self._watch.begin(began_at)
        self._meter.begin(self._scheduler.in_flight, began_at)
        output = await self._runner.execute(batch, self._on_layers if self._scheduler.completing else None)
        ended_at = self._now()
        self._watch.end(ended_at)
        self._load = self._meter.end(ended_at)
        if alone is not None:
            self._announce(alone, True)
        return output

    @property
    def load(self) -> StepLoad | None:
        """What the last step that ended computed: the one whose tokens are handed over now; None before."""
        return self._load

    @property
    def is_wedged(self) -> bool:
        """Whether the step in flight has taken far longer than steps do, or the loop leaves work alone.

        See engine/step_watch.py.
        """
        return self._watch.is_wedged(self._now())

    @property
    def is_alive(self) -> bool:
        """False once it has been wedged for so long that nothing is to be expected any more."""
        return not self._watch.is_given_up(self._now())

    @property
    def complaint(self) -> str:
        """Why nothing should be asked of it now; empty while it makes progress."""
        return "its steps make no progress" if self.is_wedged else ""

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
