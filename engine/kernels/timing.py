"""How long a call takes: by the device's own events, or by a clock that is handed in."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from triton.testing import do_bench

# A call, run several times; returns the seconds that one takes. It may raise what the call raises.
Timer = Callable[[Callable[[], object]], float]

_NUM_RUNS = 5


def event_timer(device: torch.device) -> Timer:
    """The median on a GPU, between two of its events, after warming up.

    The cache of the device is emptied before each run, which also hides what the host takes to launch it: a
    step finds its weights and keys in memory, and launches ahead of the device.
    """

    def seconds(run: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            return float(do_bench(run, warmup=5, rep=20, return_mode="median")) / 1e3

    return seconds


def clock_timer(clock: Callable[[], float]) -> Timer:
    """The median where a call returns when it is done; the first run, which compiles, does not count.

    clock: seconds.
    """

    def seconds(run: Callable[[], object]) -> float:
        run()
        times = []
        for _ in range(_NUM_RUNS):
            started_s = clock()
            run()
            times.append(clock() - started_s)
        return statistics.median(times)

    return seconds
