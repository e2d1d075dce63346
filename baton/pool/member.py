"""One worker that a pool is to have, over all its lives.

Owns what is shown of it, and when it is started again. It must not know Ray.

    placing -> starting -> serving -> draining -> (removed, or started again)
        ^                     |  \\-> unhealthy
        `---- restarting <----+---------'        -> failed, after too many quick deaths
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from baton.cluster.restart_policy import RestartPolicy, pause_after_leaving_s
from baton.errors import BatonError, Unavailable
from baton.logs import get_logger
from baton.pool.life import Life
from baton.pool.placer import Placer
from baton.pool.runtime import FoundWorker, Runtime, WorkerLost, WorkerSpec
from baton.pool.state import State
from baton.process import unless_stopped

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSetup:
    """What all members of a pool share.

    start_timeout_s: longest time until a worker serves, in seconds.
    drain_s: grace for the attempts of a worker that leaves, in seconds.
    unhealthy_s: how long one may make no progress, in seconds.
    changed: called after each change of what is shown.
    """

    runtime: Runtime
    placer: Placer
    start_timeout_s: float
    drain_s: float
    unhealthy_s: float
    rng: random.Random
    changed: Callable[[], None]


class Member:
    """A worker that is wanted. run() keeps it; after leave() it returns when the worker is gone.

    found: it serves already, since an earlier pool.
    """

    def __init__(self, spec: WorkerSpec, setup: MemberSetup, found: FoundWorker | None = None) -> None:
        self.spec = spec
        self.state = State.PLACING
        self.reason = ""
        # Of its last death: what to raise where no worker can serve.
        self.error: type[BatonError] = Unavailable
        self.since_s = asyncio.get_running_loop().time()
        self.num_restarts = 0
        # Whether it is started again after a death. While a pool starts its new workers are not, because
        # a wrong setting is better reported.
        self.is_kept_up = True
        self._setup = setup
        self._policy = RestartPolicy(setup.rng)
        self._leaving = asyncio.Event()
        # Set while it serves, or has been given up.
        self._decided = asyncio.Event()
        self._asked_to_end = asyncio.Event()
        self.life = self._new_life(found)

    @property
    def name(self) -> str:
        """Its name, for example "decode-0"."""
        return self.spec.name

    @property
    def is_leaving(self) -> bool:
        """Whether it is to be removed."""
        return self._leaving.is_set()

    @property
    def is_up(self) -> bool:
        """Whether it has come to serve, and has not ended since."""
        return self.life.facts is not None and self.state not in (State.RESTARTING, State.FAILED)

    def leave(self) -> None:
        """Drains the worker and removes it. Idempotent."""
        self._leaving.set()
        self._asked_to_end.set()

    def renew(self) -> None:
        """Drains the worker and starts it again, with its present spec."""
        self._decided.clear()
        self._asked_to_end.set()

    async def until_serving(self) -> None:
        """Returns when it serves, has been given up, or is to be removed."""
        await unless_stopped(self._leaving, self._decided.wait())

    @property
    def is_forsaken(self) -> bool:
        """Whether it goes on without this pool."""
        return self.life.is_forsaken

    def forsake(self) -> None:
        """Lets go of the worker; cancel run() after that."""
        self.life.is_forsaken = True

    async def run(self) -> None:
        """Keeps the worker until it has left or is given up. Cancelled, it kills the worker."""
        while True:
            reason = await self._live()
            if self.is_leaving:
                log.info("worker removed", worker=self.name)
                return
            pause_s = self._pause_s(reason)
            if pause_s is None:
                self._show(State.FAILED, reason)
                log.error("worker given up", worker=self.name, reason=reason)
                return
            await self._wait(pause_s, reason)
            if self._leaving.is_set():
                return
            self.num_restarts += 1
            self._asked_to_end = asyncio.Event()
            self.life = self._new_life()

    async def _live(self) -> str:
        """One life; returns its last words, "" if it left because it was asked to."""
        try:
            await self.life.run()
        except WorkerLost as end:
            self.error = end.error
            return end.reason
        return ""

    def _pause_s(self, reason: str) -> float | None:
        """Seconds until the next life, or None if there shall be none."""
        since_s = self.life.served_since_s
        lived_s = 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s
        if not reason:
            return pause_after_leaving_s(lived_s)
        pause_s = self._policy.pause_s(lived_s)
        return pause_s if self.is_kept_up else None

    async def _wait(self, pause_s: float, reason: str) -> None:
        """Between two lives."""
        self._show(State.RESTARTING, reason or "it left after a signal, or for new settings")
        tell = log.warning if reason else log.info
        tell("worker starts again", worker=self.name, reason=self.reason, pause_s=round(pause_s, 3))
        await unless_stopped(self._leaving, asyncio.sleep(pause_s))
        if self._setup.runtime.silent_s:
            self._show(State.RESTARTING, f"{self.reason}; Ray's control service does not answer")
            await unless_stopped(self._leaving, self._setup.runtime.until_answering())

    def _new_life(self, found: FoundWorker | None = None) -> Life:
        return Life(
            self.spec,
            runtime=self._setup.runtime,
            placer=self._setup.placer,
            start_timeout_s=self._setup.start_timeout_s,
            drain_s=self._setup.drain_s,
            unhealthy_s=self._setup.unhealthy_s,
            asked_to_end=self._asked_to_end,
            show=self._show,
            found=found,
        )

    def _show(self, state: State, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        if state is State.PLACING and reason:
            log.warning("no room for a worker", worker=self.name, reason=reason)
        if state is not self.state:
            self.since_s = asyncio.get_running_loop().time()
        self.state, self.reason = state, reason
        if state in (State.SERVING, State.FAILED):
            self._decided.set()
        else:
            self._decided.clear()
        self._setup.changed()
