"""How long calls take on a device, launched as fast as it can take them; and how fast the device is at best.

On a GPU calls are recorded as a graph and replayed between two events: so a small kernel's time is its own,
and not that of the host's launching it. Calls should be the same work on different tensors, together larger
than the device's cache. On a CPU, where kernels are interpreted, one run by the wall clock has to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from engine.kernels.cost import GPUS, Gpu

Call = Callable[[], object]

# Replays go on for about so long, and are so many at least and at most.
_REPLAY_S = 0.03
_MIN_REPLAYS, _MAX_REPLAYS = 5, 50
# Calls in one graph at the least where they are short: the gap between two replays is no part of any call.
_GRAPH_CALLS = 10
_SHORT_S = 1e-3
# Of what the clock times on a GPU; they go on for about so long between the two.
_MIN_RUNS, _MAX_RUNS = 3, 10
_RUNS_S = 1.0
_GEMM_SIZE = {"cuda": 8192, "cpu": 128}
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 1 << 20}


def call_seconds(calls: Sequence[Call], device: torch.device) -> float:
    """The median of one call's seconds."""
    for call in calls:
        call()
    if device.type != "cuda":
        return wall_seconds(calls[0], device)
    is_short = _between_events(calls[0]) < _SHORT_S
    rounds = -(-_GRAPH_CALLS // len(calls)) if is_short else 1
    graph = recorded([call for _ in range(rounds) for call in calls])
    first = _between_events(graph.replay)
    count = min(max(int(_REPLAY_S / max(first, 1e-6)), _MIN_REPLAYS), _MAX_REPLAYS)
    return median(_between_events(graph.replay) for _ in range(count)) / (rounds * len(calls))


def recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of calls that have run before: what is made at first use must be there."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def wall_seconds(call: Call, device: torch.device) -> float:
    """The median of a call from its start to the end of what it launched, by the clock."""
    times: list[float] = []
    max_runs = _MAX_RUNS if device.type == "cuda" else 1
    while len(times) < max_runs and (len(times) < _MIN_RUNS or sum(times) < _RUNS_S):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times)


def launch_seconds(call: Call, device: torch.device) -> float:
    """The median of what the host takes for a call whose work a device does meanwhile."""
    times = []
    for _ in range(_MIN_RUNS if device.type == "cuda" else 1):
        synchronize(device)
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    synchronize(device)
    return median(times)


def synchronize(device: torch.device) -> None:
    """Returns once a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_gpu(device: torch.device) -> Gpu:
    """What a matrix product of the vendor's and a copy reach here, on random data."""
    size, num_elements = _GEMM_SIZE[device.type], _COPY_BYTES[device.type] // 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product_s = call_seconds([lambda: torch.mm(a, b)], device)
    source = torch.zeros(num_elements, dtype=torch.float16, device=device).normal_()
    target = torch.empty_like(source)
    copy_s = call_seconds([lambda: target.copy_(source)], device)
    return Gpu(name=device_name(device), flops=2 * size**3 / product_s, bandwidth=4 * num_elements / copy_s)


def device_name(device: torch.device) -> str:
    """As its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def data_sheet(name: str) -> Gpu | None:
    """The vendor's own figures, if they are known here."""
    return next((gpu for gpu in GPUS if gpu.name in name), None)


def _between_events(run: Call) -> float:
    """Seconds."""
    begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
