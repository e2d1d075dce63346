"""The thread on which an actor's worker serves, with an event loop of its own.

Ray's threads and the worker's event loop thereby never wait for each other. When the worker ends, so does
the process: Ray would keep an actor whose worker is gone, and what is to follow is decided by the pool.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from baton.errors import BatonError
from baton.logs import get_logger
from baton.metrics import shutdown_metrics
from baton.pool.actor_metrics import ActorMetrics
from baton.served_role import ServedRole
from baton.telemetry import shutdown_tracing
from baton.worker_process import Served

# Less than a pool waits for an answer: an event loop that is stuck is an answer too.
LOOK_WITHIN_S: Final = 1.0
METRICS_EVERY_S: Final = 2.0
# Whoever waits for the end hears of it before the process is gone.
FAREWELL_S: Final = 0.5

log = get_logger(__name__)


class ServingThread:
    """One worker that serves from start() until leave(), or its death, which is the process's."""

    def __init__(self, role: ServedRole, config: Any) -> None:
        self._role = role
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._serving: Future[Served] = Future()
        self._ended = threading.Event()
        self._showing: asyncio.Task[None] | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to leave."""
        return self._stop.is_set()

    def start(self) -> Served:
        """Starts it and waits until it serves; raises what keeps it from that."""
        threading.Thread(target=self._run, name=f"{self._role.name} worker", daemon=True).start()
        return self._serving.result()

    def leave(self) -> None:
        """Tells the worker to drain and leave. Idempotent; for any thread, and for signal handlers."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the worker has drained and left, some moments before the process ends.

        timeout_s: how long to wait for it, in seconds.
        """
        return self._ended.wait(timeout_s)

    def look(self) -> dict[str, Any]:
        """How the worker is and how busy, asked on its event loop: an answer shows that the loop turns."""
        looking = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        try:
            return looking.result(LOOK_WITHIN_S)
        except TimeoutError:
            looking.cancel()
            reason = f"its event loop has not answered for {LOOK_WITHIN_S:g} s"
            health = {"is_ready": False, "is_alive": False, "reason": reason}
            return {"health": health, "load": None, "is_draining": self.is_leaving}

    async def _look(self) -> dict[str, Any]:
        served = self._serving.result()
        health, load = asdict(served.health()), asdict(served.load())
        return {"health": health, "load": load, "is_draining": self.is_leaving}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            if isinstance(error, BatonError):
                log.error("cannot run", code=error.code, reason=error.message, field=error.field)
            else:
                log.exception("worker failed")
            if not self._serving.done():
                self._serving.set_exception(error)
                return
            os._exit(1)
        shutdown_tracing()
        shutdown_metrics()
        self._ended.set()
        time.sleep(FAREWELL_S)
        os._exit(0)

    async def _serve(self) -> None:
        try:
            await self._role.serve(self._config, self._stop, on_serving=self._on_serving)
        finally:
            if self._showing is not None:
                self._showing.cancel()
                with suppress(asyncio.CancelledError):
                    await self._showing

    def _on_serving(self, served: Served) -> None:
        self._showing = asyncio.create_task(self._show(served))
        self._serving.set_result(served)

    async def _show(self, served: Served) -> None:
        try:
            metrics = ActorMetrics(self._config.name, self._role.name)
            while True:
                metrics.show(served.load(), served.totals())
                await asyncio.sleep(METRICS_EVERY_S)
        except Exception:
            # A worker without charts is still a worker, and its drain is to end as planned.
            log.exception("metrics failed")
