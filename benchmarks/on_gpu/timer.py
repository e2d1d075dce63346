"""How long calls take on a device, launched as fast as it can take them; and how fast the device is at best.

On a GPU calls are recorded as a graph and replayed between two events: so a small kernel's time is its own,
and not that of the host's launching it. Calls should be the same work on different tensors, together larger
than the device's cache. On a CPU, where kernels are interpreted, one run by the wall clock has to do.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
# An idle device's clock is low, and takes a while to rise.
_WARM_UP_S = 0.4
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Times:
    """seconds: of one call, as often as it was timed."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """What is taken for the call's time."""
        return median(self.seconds)

    @property
    def runs(self) -> int:
        """How many there are."""
        return len(self.seconds)

    def spread(self) -> dict[str, float]:
        """Of a row in ms: the shortest and the longest."""
        return {"min ms": 1e3 * min(self.seconds), "max ms": 1e3 * max(self.seconds)}


def call_times(calls: Sequence[Call], device: torch.device) -> Times:
    """Of one of several calls alike."""
    if device.type != "cuda":
        return wall_times({"": calls[0]}, device)[""]
    for call in calls:
        call()
    is_short = _between_events(calls[0]) < _SHORT_S
    rounds = -(-_GRAPH_CALLS // len(calls)) if is_short else 1
    graph = recorded([call for _ in range(rounds) for call in calls])
    first = _between_events(graph.replay)
    count = min(max(int(_REPLAY_S / max(first, 1e-6)), _MIN_REPLAYS), _MAX_REPLAYS)
    replays = [_between_events(graph.replay) for _ in range(count)]
    return Times(tuple(seconds / (rounds * len(calls)) for seconds in replays))


def recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of calls that have run before: what is made at first use must be there."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def wall_times(calls: Mapping[str, Call], device: torch.device) -> dict[str, Times]:
    """By name: of calls from their start to the end of what they launched, by the clock.

    They take turns, and turns in who is first: what changes meanwhile, such as the device's clock, is all's.
    On a GPU a run before does not count.
    """
    if device.type == "cuda":
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, max_runs = list(calls), _MAX_RUNS if device.type == "cuda" else 1
    for count in range(max_runs):
        if count >= _MIN_RUNS and sum(map(sum, times.values())) >= _RUNS_S * len(calls):
            break
        for name in order:
            synchronize(device)
            began = time.perf_counter()
            calls[name]()
            synchronize(device)
            times[name].append(time.perf_counter() - began)
        order.reverse()
    return {name: Times(tuple(of_one)) for name, of_one in times.items()}


def launch_seconds(call: Call, device: torch.device) -> float:
    """The median of what the host takes for a call, which has run before, while a device does its work."""
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


def is_usable(device: torch.device) -> bool:
    """False once a kernel has read or written where it must not: no call of this process succeeds then."""
    try:
        synchronize(device)
    except Exception:  # noqa: BLE001  (whatever it is, it is the answer)
        return False
    return True


def warm_up(device: torch.device) -> None:
    """Keeps the device busy until its clock is what it is under load. For the start of every process."""
    if device.type == "cuda":
        _multiply(device, _WARM_UP_S)
        synchronize(device)


def clock_mhz(device: torch.device) -> float | None:
    """Of the device's multiprocessors while they compute; None if nothing tells."""
    if device.type != "cuda":
        return None
    # Longer than the question takes.
    _multiply(device, _WARM_UP_S)
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S).stdout
        return float(said)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    finally:
        synchronize(device)


def measured_gpu(device: torch.device) -> Gpu:
    """What a matrix product of the vendor's and a copy reach here, on random data."""
    size, num_elements = _GEMM_SIZE[device.type], _COPY_BYTES[device.type] // 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product_s = call_times([lambda: torch.mm(a, b)], device).median
    source = torch.zeros(num_elements, dtype=torch.float16, device=device).normal_()
    target = torch.empty_like(source)
    copy_s = call_times([lambda: target.copy_(source)], device).median
    return Gpu(name=device_name(device), flops=2 * size**3 / product_s, bandwidth=4 * num_elements / copy_s)


def device_name(device: torch.device) -> str:
    """As its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def data_sheet(name: str) -> Gpu | None:
    """The vendor's own figures, if they are known here."""
    return next((gpu for gpu in GPUS if gpu.name in name), None)


def _multiply(device: torch.device, seconds: float) -> None:
    """Gives a GPU so much to do, or more if it is none of the fastest known."""
    size = _GEMM_SIZE[device.type]
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product_s = 2 * size**3 / max(gpu.flops for gpu in GPUS)
    for _ in range(int(seconds / product_s)):
        torch.mm(a, b)


def _between_events(run: Call) -> float:
    """Seconds."""
    begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
