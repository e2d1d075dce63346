"""One life of a worker: placed, started, watched, drained, and its place given back.

Owns the order of these steps. It must not know Ray, and not what comes after a death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from baton.health import WorkerLoad
from baton.logs import get_logger
from baton.pool.health_watch import ASK_EVERY_S, HealthWatch
from baton.pool.placer import Placer
from baton.pool.runtime import (
    FoundWorker,
    Place,
    Runtime,
    WorkerAnswer,
    WorkerFacts,
    WorkerHandle,
    WorkerLost,
    WorkerSpec,
)
from baton.pool.state import State
from baton.process import unless_stopped

# Beyond the grace of its attempts: leaving the registry, joining threads.
EXTRA_GRACE_S: Final = 10.0

log = get_logger(__name__)


class Life:
    """A worker from its place to its end; run() once.

    start_timeout_s: longest time until it serves.  drain_s: grace for its attempts.
    unhealthy_s: how long it may make no progress. All in seconds.
    asked_to_end: set when it is to drain and leave.
    show: hears of each new state and, for people, why the worker is not serving.
    found: it serves already, since an earlier pool.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        runtime: Runtime,
        placer: Placer,
        start_timeout_s: float,
        drain_s: float,
        unhealthy_s: float,
        asked_to_end: asyncio.Event,
        show: Callable[[State, str], None],
        found: FoundWorker | None = None,
    ) -> None:
        self.place: Place | None = None
        self.handle: WorkerHandle | None = None
        self.facts: WorkerFacts | None = None
        self.load: WorkerLoad | None = None
        self.served_since_s: float | None = None
        # Whether it is left to itself at the end.
        self.is_forsaken = False
        self._spec = spec
        self._runtime = runtime
        self._placer = placer
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._unhealthy_s = unhealthy_s
        self._asked_to_end = asked_to_end
        self._show = show
        self._was_ready = False
        if found is not None:
            self._adopt(found)

    async def run(self) -> None:
        """Returns when the worker has left, because it was asked to or got a signal.

        Raises WorkerLost if it ends otherwise. In any case nothing is left of it.
        """
        try:
            if self.facts is None:
                await self._begin()
            else:
                self._show(State.STARTING, "")
            if self.handle is not None and self.facts is not None:
                await self._serve(self.handle)
        except WorkerLost as end:
            self._show(State.RESTARTING, end.reason)
            raise
        finally:
            await self._clear()

    async def _begin(self) -> None:
        """Until it serves, or is asked to end."""
        self._show(State.PLACING, "")
        await unless_stopped(self._asked_to_end, self._take_place())
        if self.place is None or self._asked_to_end.is_set():
            return
        self._show(State.STARTING, "")
        self.handle = await self._runtime.start_worker(self._spec, self.place)
        await unless_stopped(self._asked_to_end, self._take_facts(self.handle))

    def _adopt(self, found: FoundWorker) -> None:
        self.place, self.handle, self.facts = found.facts.place, found.handle, found.facts
        self.served_since_s = asyncio.get_running_loop().time()
        self._placer.adopt(self._spec.name, found.facts.place)

    async def _take_place(self) -> None:
        self.place = await self._placer.place(self._spec.name, partial(self._show, State.PLACING))

    async def _take_facts(self, handle: WorkerHandle) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self.facts = await handle.facts()
        except TimeoutError:
            raise WorkerLost(f"it has not come to serve within {self._start_timeout_s:g} s") from None
        self.served_since_s = asyncio.get_running_loop().time()
        self._show(State.STARTING, "")
        log.info("worker started", worker=self._spec.name, pid=self.facts.pid, address=self.facts.address)

    async def _serve(self, handle: WorkerHandle) -> None:
        ended = asyncio.ensure_future(handle.ended())
        watched = asyncio.ensure_future(self._watch(handle))
        asked = asyncio.ensure_future(self._asked_to_end.wait())
        try:
            await asyncio.wait((ended, watched, asked), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
            elif watched.done():
                watched.result()
            else:
                await self._drain(handle, ended)
        finally:
            for task in (ended, watched, asked):
                task.cancel()
            await asyncio.gather(ended, watched, asked, return_exceptions=True)

    async def _drain(self, handle: WorkerHandle, ended: asyncio.Future[None]) -> None:
        """Until it has left, died of it, or taken too long."""
        self._show(State.DRAINING, "")
        log.info("worker drains", worker=self._spec.name)
        grace_s = self._drain_s + EXTRA_GRACE_S
        try:
            async with asyncio.timeout(grace_s):
                await handle.drain()
                await ended
        except TimeoutError:
            log.warning(
                "worker is killed", worker=self._spec.name, reason=f"it has not left in {grace_s:g} s"
            )
        except WorkerLost as end:
            log.warning("worker ended in its drain", worker=self._spec.name, reason=end.reason)

    async def _watch(self, handle: WorkerHandle) -> None:
        """Follows the worker's health until it counts as lost."""
        watch, clock = HealthWatch(self._unhealthy_s), asyncio.get_running_loop()
        heard_s = clock.time()
        while not watch.is_lost:
            answer = await handle.ask()
            now = clock.time()
            is_excused = answer is None and self._runtime.silent_s > 0
            watch.heard(now - heard_s, None if answer is None else answer.health, is_excused=is_excused)
            heard_s = now
            self._heard(answer, watch)
            await asyncio.sleep(ASK_EVERY_S)
        raise WorkerLost(f"{watch.reason}, for {self._unhealthy_s:g} s")

    def _heard(self, answer: WorkerAnswer | None, watch: HealthWatch) -> None:
        if answer is not None:
            self.load = answer.load or self.load
            self._was_ready |= answer.health.is_ready
        if watch.is_unhealthy:
            self._show(State.UNHEALTHY, watch.reason)
        elif self._asked_to_end.is_set() or (answer is not None and answer.is_draining):
            self._show(State.DRAINING, "")
        elif answer is not None:
            self._show(State.SERVING if self._was_ready else State.STARTING, answer.health.reason)

    async def _clear(self) -> None:
        if self.is_forsaken:
            return
        # Where Ray has ended there is nothing to give back.
        with suppress(WorkerLost):
            if self.handle is not None:
                await self._runtime.kill(self.handle)
            if self.place is not None:
                await self._placer.free(self._spec.name, self.place)
