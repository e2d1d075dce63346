"""Runs a compiled function on torch's own threads.

torch's products keep their threads awake between two of them. A second pool of threads would compete with
these for the cores, so kernels use the same: OpenMP's GNU runtime, which torch brings along, starts them.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numba
import torch
from numba import cfunc, types

from baton.cache import cache_dir
from engine.cpu.numbers import FAST
from engine.private_folder import make_private

# Seen from inside of a kernel.
thread_index: Final = types.ExternalFunction("omp_get_thread_num", types.int32())
num_threads: Final = types.ExternalFunction("omp_get_num_threads", types.int32())
barrier: Final = types.ExternalFunction("GOMP_barrier", types.void())

Arguments = types.CPointer(types.int64)
_SIGNATURE: Final = types.void(Arguments)
# Elements below which a second thread costs more than it computes.
_WORTH_A_THREAD: Final = 8192


@cache
def _start() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the runtime that torch has loaded, or None."""
    try:
        start = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


@cache
def _keeps() -> bool:
    """Whether compiled kernels can be kept in the cache folder; they are looked for there first."""
    folder = cache_dir() / "numba"
    try:
        make_private(folder)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(folder)
    return os.access(folder, os.W_OK)


def has_team() -> bool:
    """Whether there is such a runtime here."""
    return _start() is not None


def max_threads() -> int:
    """Most threads that a kernel runs on."""
    return torch.get_num_threads()


class Kernel:
    """A function of whole numbers: addresses, sizes, strides, and floats by their bits.

    body: compiled; takes a pointer to these numbers, and learns by thread_index() and num_threads() which
        part of the work is its own.  is_fast: its own sums may be rearranged.
    """

    def __init__(self, body: Callable[..., None], *, is_fast: bool = False) -> None:
        compiled = cfunc(
            _SIGNATURE, cache=_keeps(), error_model="numpy", fastmath=set(FAST) if is_fast else False
        )(body)
        self._compiled = compiled
        self._address: int = compiled.address
        start = _start()
        assert start is not None, "has_team() says whether kernels can be used"
        self._start = start

    def __call__(self, num_elements: int, *numbers: int) -> None:
        """Runs it on as many threads as torch has, on one where there is little to do; waits for all."""
        threads = 1 if num_elements < _WORTH_A_THREAD else max_threads()
        arguments = array("q", numbers)
        self._start(self._address, arguments.buffer_info()[0], threads, 0)


def float_bits(x: float) -> int:
    """A float32 as a whole number."""
    bits: Any = array("f", [x])
    return int.from_bytes(bits.tobytes(), "little", signed=True)
