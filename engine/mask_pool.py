"""The threads on which grammars are compiled and masks computed, while the model runs.

Owns the threads and their queues. Both kinds of work free the GIL. A mask waits behind masks only, so a
grammar that takes its time to compile delays nobody's step; and if no thread gets to a mask
in time, whoever wants it computes it (engine/token_mask.py).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.errors import Overloaded
from engine.fulfil import fulfil
from engine.token_mask import TokenMask

ResultT = TypeVar("ResultT")

# Under a minute at the 0.5 to 0.9 s of the worst grammar; everyday ones take a millisecond.
MAX_COMPILATIONS = 64


class MaskPool:
    """One thread for masks, one for compiling; daemons that sleep on their queues."""

    def __init__(self) -> None:
        self._masks: queue.SimpleQueue[TokenMask | None] = queue.SimpleQueue()
        self._compilations: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._awaited: set[Future[Any]] = set()
        self._threads = [
            threading.Thread(target=self._compute, name="masks", daemon=True),
            threading.Thread(target=self._compile, name="grammars", daemon=True),
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def num_compilations(self) -> int:
        """Compilations that somebody waits for."""
        return len(self._awaited)

    def start(self, mask: TokenMask) -> None:
        """Computes a mask soon. Never blocks; at most one per request waits, so the queue is bounded."""
        self._masks.put(mask)

    def compile(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Runs what compiles a grammar; what it raises reaches whoever takes the result.

        Raises Overloaded while MAX_COMPILATIONS are awaited. Cancelling the future keeps work that has not
        begun from running, and takes no place any more.
        """
        if self._closed:
            raise RuntimeError("the mask pool is closed")
        if len(self._awaited) >= MAX_COMPILATIONS:
            raise Overloaded("too many grammars wait to be compiled; try again later", retry_after_s=1.0)
        future: Future[ResultT] = Future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        self._compilations.put((future, work))
        return future

    async def close(self, timeout_s: float) -> None:
        """Ends both threads after what they are at, and waits for timeout_s seconds at most; idempotent.

        Compilations that have not begun are cancelled.
        """
        if not self._closed:
            self._closed = True
            self._masks.put(None)
            self._compilations.put(None)
        async with asyncio.TaskGroup() as group:
            for thread in self._threads:
                group.create_task(asyncio.to_thread(thread.join, timeout_s))

    def _compute(self) -> None:
        while (mask := self._masks.get()) is not None:
            mask.compute()

    def _compile(self) -> None:
        while (item := self._compilations.get()) is not None:
            future, work = item
            if self._closed:
                future.cancel()
            fulfil(future, work)
