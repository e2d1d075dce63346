"""The thread that reads KV out of a prefill worker's cache: digests and copies, beside event loop and steps.

An edge of the process: it hands the transports their Offload and knows nothing about what runs on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class SenderThread:
    """Runs one function at a time, in order. Call close() at the end."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-sender")

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        """Runs a function on the thread. Cancelling the wait stops nothing that has begun."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Ends the thread after what it does now; what is queued behind is dropped. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
