"""The set of tokens that may come next, computed by whoever gets to it first.

Knows nothing of grammars or of threads' owners. A pool thread begins a mask while the model
runs; the engine thread takes it after the forward pass, and computes it itself if no pool
thread has begun. So a busy or closed pool costs time, never an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

UInt32Array = NDArray[np.uint32]


class TokenMask:
    """One position's mask; computed once.

    compute: makes the bits; runs on the first thread that calls compute() or bits(). What it raises,
        bits() raises.
    """

    def __init__(self, compute: Callable[[], UInt32Array]) -> None:
        self._compute = compute
        self._claim = threading.Lock()
        self._bits: Future[UInt32Array] = Future()

    def compute(self) -> None:
        """Computes the mask here and now, unless some thread has begun or drop() was called. Never raises."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            bits = self._compute()
        except BaseException as error:  # noqa: BLE001  (it is handed to whoever wants the bits)
            self._bits.set_exception(error)
        else:
            self._bits.set_result(bits)

    def bits(self) -> UInt32Array:
        """[ceil(V / 32)] uint32, read-only: bit i % 32 of word i // 32 says whether token i may come next.

        Blocks until computed. Raises the BatonError that ends the request.
        """
        self.compute()
        return self._bits.result()

    def drop(self) -> None:
        """Nobody wants the bits any more: waits for a thread that has begun, keeps others from beginning."""
        if self._claim.acquire(blocking=False):
            self._bits.set_exception(RuntimeError("the mask of a token that is already chosen"))
        self._bits.exception()
