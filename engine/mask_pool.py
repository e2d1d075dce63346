"""The threads on which grammars are compiled and masks computed, while the model runs.

Owns the threads and their queues. Both kinds of work free the GIL. A mask waits behind masks only, so a
grammar that takes its time to compile delays nobody's step; and if no thread gets to a mask
in time, whoever wants it computes it (engine/token_mask.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.errors import Overloaded
from engine.token_mask import TokenMask

ResultT = TypeVar("ResultT")

# Under a minute at the 0.5 to 0.9 s of the worst grammar; everyday ones take a millisecond.
MAX_WAITING_COMPILATIONS = 64


class MaskPool:
    """One thread for masks, one for compiling; daemons that sleep on their queues."""

    def __init__(self) -> None:
        self._masks: queue.SimpleQueue[TokenMask | None] = queue.SimpleQueue()
        self._compilations: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
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
    def num_waiting_compilations(self) -> int:
        """Compilations that no thread has begun."""
        return self._compilations.qsize()

    def start(self, mask: TokenMask) -> None:
        """Computes a mask soon. Never blocks; at most one per request waits, so the queue is bounded."""
        self._masks.put(mask)

    def compile(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Runs what compiles a grammar; what it raises reaches whoever takes the result.

        Raises Overloaded when MAX_WAITING_COMPILATIONS wait. Cancelling the future keeps work that has
        not begun from running.
        """
        if self._closed:
            raise RuntimeError("the mask pool is closed")
        if self._compilations.qsize() >= MAX_WAITING_COMPILATIONS:
            raise Overloaded("too many grammars wait to be compiled; try again later", retry_after_s=1.0)
        future: Future[ResultT] = Future()
        self._compilations.put((future, work))
        return future

    def close(self) -> None:
        """Ends both threads after what they are at, and waits for them; idempotent.

        Compilations that have not begun are cancelled.
        """
        if not self._closed:
            self._closed = True
            self._masks.put(None)
            self._compilations.put(None)
        for thread in self._threads:
            thread.join()

    def _compute(self) -> None:
        while (mask := self._masks.get()) is not None:
            mask.compute()

    def _compile(self) -> None:
        while (item := self._compilations.get()) is not None:
            future, work = item
            if self._closed:
                future.cancel()
            # False if it was cancelled before the work began.
            if future.set_running_or_notify_cancel():
                _fulfil(future, work)


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  (it is handed to the awaiting caller)
        future.set_exception(error)
    else:
        future.set_result(result)
