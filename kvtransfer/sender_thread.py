"""The thread that reads KV out of a prefill worker's cache: digests and copies, beside event loop and steps.

An edge of the process: it hands the transports their Offload and knows nothing about what runs on it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.fulfil import fulfil

T = TypeVar("T")


class SenderThread:
    """Runs one function at a time, in order. Call close() at the end."""

    def __init__(self, name: str = "kv-sender") -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # A daemon, so that a wedged device cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        """Runs a function on the thread. Cancelling the wait stops nothing that has begun."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the thread after what is queued. Idempotent."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function = item
            fulfil(future, function)
