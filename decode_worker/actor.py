"""A decode worker as a Ray actor: Ray places and restarts it, and is never on the token path.

The worker serves from a thread of its own, so that Ray's event loop and the
worker's never wait for each other. If the worker ends on its own, the process
exits and Ray starts it again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from baton.logs import configure_logging
from baton.telemetry import configure_tracing, shutdown_tracing
from decode_worker.config import DecodeConfig
from decode_worker.serve import serve


class DecodeWorker:
    """Runs one decode worker for as long as the actor lives.

    settings: fields of DecodeConfig that differ from its defaults; Ray hands them
        to every restart.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._config = DecodeConfig(**settings)
        configure_logging(self._config.name, self._config.log_level, self._config.log_file or None)
        configure_tracing("baton-decode", self._config.name, self._config.trace_file or None)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="decode-worker", daemon=True)
        self._thread.start()

    def describe(self) -> dict[str, Any]:
        """Name and process id, to see that the actor is alive."""
        return {"name": self._config.name, "pid": os.getpid()}

    def shutdown(self) -> None:
        """Leaves the registry and stops serving; returns when that is done."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._config.drain_s + 5.0)
        shutdown_tracing()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(serve(self._config, self._stop))
        finally:
            if not self._stop.is_set():
                # Without its worker the actor is of no use. Only a dead process makes Ray start a new one.
                os._exit(1)
