"""Ctrl-C, SIGTERM and a closed terminal: the first one asks, the second one does not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Runs one piece of work that signals end.

    on_first: called when the work is told to end.
    on_second: called when the user will not wait for that; it must not return.
    """

    def __init__(self, *, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        self._on_first = on_first
        self._on_second = on_second
        self.num_heard = 0

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Returns when the work has ended, by itself or cancelled by a signal; its errors are raised."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        for number in SIGNALS:
            loop.add_signal_handler(number, self._hear, task)
        try:
            await asyncio.wait([task])
            if not (task.cancelled() and self.num_heard):
                task.result()
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _hear(self, task: asyncio.Task[None]) -> None:
        self.num_heard += 1
        if self.num_heard > 1:
            self._on_second()
        self._on_first()
        task.cancel()
