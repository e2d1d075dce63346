"""A decode worker as a Ray actor: Ray places and restarts it, and is never on the token path.

The worker serves from a thread of its own, so that Ray's event loop and the
worker's never wait for each other. If the worker ends on its own, the process
exits and Ray starts it again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from typing import Any

from baton.errors import BatonError
from baton.logs import configure_logging, get_logger
from baton.metrics import configure_metrics, shutdown_metrics
from baton.telemetry import configure_tracing, shutdown_tracing
from decode_worker.config import DecodeConfig
from decode_worker.serve import serve

log = get_logger(__name__)


class DecodeWorker:
    """Runs one decode worker for as long as the actor lives; it serves when the constructor returns.

    settings: fields of DecodeConfig that differ from its defaults; Ray hands them
        to every restart.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._config = DecodeConfig(**settings)
        configure_logging(self._config.name, self._config.log_level, self._config.log_file or None)
        configure_tracing("baton-decode", self._config.name, self._config.trace_file or None)
        configure_metrics("baton-decode", self._config.name)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._serving: Future[None] = Future()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="decode-worker", daemon=True)
        self._thread.start()
        self._serving.result()

    def describe(self) -> dict[str, Any]:
        """Name and process id, to see that the actor is alive."""
        return {"name": self._config.name, "pid": os.getpid()}

    def wait_closed(self) -> None:
        """Returns after shutdown(); the caller hears of any other end from Ray."""
        self._ended.wait()

    def shutdown(self) -> None:
        """Leaves the registry and stops serving; returns when that is done."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._config.drain_s + 5.0)
        shutdown_tracing()
        shutdown_metrics()
        self._ended.set()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(
                serve(self._config, self._stop, on_serving=lambda: self._serving.set_result(None))
            )
        except Exception as error:
            if isinstance(error, BatonError):
                log.error("cannot run", code=error.code, reason=error.message, field=error.field)
            else:
                log.exception("decode worker failed")
            if not self._serving.done():
                self._serving.set_exception(error)
                return
        finally:
            self._leave_if_useless()

    def _leave_if_useless(self) -> None:
        """Without its worker the actor is of no use, and only a dead process makes Ray start a new one."""
        if self._serving.exception() is None and not self._stop.is_set():
            os._exit(1)
