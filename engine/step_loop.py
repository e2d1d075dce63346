"""The loop both workers run: ask the scheduler for a batch, execute it, apply the result.

Lives on the event loop; the model runs wherever the StepRunner runs it. Sleeps
while there is no work, and never polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.scheduler import Event, Scheduler
from engine.step_runner import StepRunner
from engine.step_watch import StepWatch


class StepLoop:
    """Drives one scheduler with one runner.

    handle: called with the events of every step, on the event loop. It owns the
        blocks of every request that an event says has left the scheduler.
    """

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, handle: Callable[[list[Event]], None]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._handle = handle
        self._work = asyncio.Event()
        self._watch = StepWatch()

    def wake(self) -> None:
        """Says that the scheduler may have work."""
        self._work.set()

    async def run(self) -> None:
        """Runs steps until cancelled. A failing step ends the loop, and with it the worker."""
        while True:
            batch = self._scheduler.next_batch()
            if batch is None:
                self._work.clear()
                await self._work.wait()
                continue
            self._watch.begin(self._now())
            output = await self._runner.execute(batch)
            self._watch.end(self._now())
            self._handle(self._scheduler.apply(output))

    @property
    def is_wedged(self) -> bool:
        """Whether the step in flight has taken far longer than steps do; see engine/step_watch.py."""
        return self._watch.is_wedged(self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
