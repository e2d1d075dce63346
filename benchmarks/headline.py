"""Row 20: P99 prefill latency of buckets and packing against naive padded batches, on the 80/15/5 mix.

    capacity    both sides get the same prompts at once: prompts/s until the last is answered
    windows     open loop at 70 % of our capacity, and at 70 % of the naive side's; sides take turns

Prefill only: every answer has one token. Both sides compute on the same number of threads, with the same
model code; ours has its router and gRPC on the same cores as well. Latency counts from when a prompt was due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from baton.bench.open_loop import offer
from baton.bench.outcome import Outcome
from baton.bench.percentiles import percentile
from baton.bench.target import Bounds, Target
from benchmarks.attainment import Objectives, Window
from benchmarks.goodput_sides import DISAGGREGATED, Side, running
from benchmarks.goodput_sweep import SHORTEST_WINDOW_S
from benchmarks.padded_process import PaddedProcess
from benchmarks.report import Row
from benchmarks.workload import Workload

OURS = "bucketed and packed"
NAIVE = "padded FIFO"
LOAD = 0.7
HEADLINE_TARGET = 2.67
PACKING_TARGET = 1.5
# Prompts that tell a side's capacity, in whole blocks of the mix.
NUM_CALIBRATION, QUICK_CALIBRATION = 40, 20
# Nothing is cut off: where the naive side is over its capacity, its queue is the result.
BOUNDS = Bounds(max_in_flight=2000, deadline_s=120.0)
# Of a round: four windows, and one for what the naive side has still to do when its own have ended.
_WINDOWS_PER_ROUND = 5
# Starts, warm-up and calibration of both sides, measured on two cores.
_START_S = 60.0


@dataclass(slots=True)
class Headline:
    """One run. capacities: prompts/s by side. windows: of all rounds."""

    workload: Workload
    model: str
    folder: Path
    threads: int
    batch_size: int
    rounds: int
    window_s: float
    seed: int
    num_calibration: int = NUM_CALIBRATION
    report: Callable[[str], None] = print
    windows: list[Window] = field(default_factory=list)
    capacities: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Calibrates and measures."""
        ours = Side(
            name=OURS,
            cluster={"prefill": 1, "decode": 1, "threads": self.threads, "placement": DISAGGREGATED},
        )
        async with AsyncExitStack() as stack:
            naive = PaddedProcess.start(self.model, threads=self.threads, batch_size=self.batch_size)
            targets: dict[str, Target] = {
                OURS: await stack.enter_async_context(running(ours, self.model, self.folder, self.workload)),
                NAIVE: await stack.enter_async_context(naive),
            }
            await self._calibrate(targets)
            for number in range(1, self.rounds + 1):
                for rate in self.rates:
                    # Each goes first as often as the other.
                    for side in list(targets)[:: 1 if number % 2 else -1]:
                        await self._measure(side, targets[side], rate, number)

    @property
    def rates(self) -> tuple[float, float]:
        """LOAD of either side's capacity, ours first, in prompts/s."""
        return LOAD * self.capacities[OURS], LOAD * self.capacities[NAIVE]

    def rows(self) -> list[Row]:
        """Capacity, then latencies at both rates."""
        ours, naive = self.capacities[OURS], self.capacities[NAIVE]
        capacity = Row(
            metric=f"{self.workload.name}: prompts at once, {OURS}",
            unit="prompts/s",
            ours=ours,
            runs=1,
            peer=naive,
            peer_name=NAIVE,
            ratio=ours / naive,
            target=PACKING_TARGET,
        )
        by_rate = zip(self.rates, ("our", "its peer's"), strict=True)
        return [capacity] + [
            self._latency_row(rate, f"{100 * LOAD:g} % of {whose}", percent)
            for rate, whose in by_rate
            for percent in (50, 99)
        ]

    def facts(self) -> dict[str, object]:
        """For the record."""
        return {
            "workload": self.workload.name,
            "cv": self.workload.cv,
            "model": self.model,
            "seed": self.seed,
            "threads": self.threads,
            "batch_size": self.batch_size,
            "rounds": self.rounds,
            "window_s": round(self.window_s, 1),
            "capacities": {side: round(value, 3) for side, value in self.capacities.items()},
            "windows": [window.facts() for window in self.windows],
        }

    async def _calibrate(self, targets: dict[str, Target]) -> None:
        requests = self.workload.burst(self.num_calibration, self.seed)
        for side, target in targets.items():
            outcomes = await offer(target, requests, BOUNDS)
            self.capacities[side] = len(outcomes) / max(latencies_s(outcomes))
            self.report(f"{side}: {self.capacities[side]:.2f} prompts/s at once")
        for rate in self.rates:
            loads = (f"{side} to {rate / capacity:.0%}" for side, capacity in self.capacities.items())
            self.report(f"{rate:.2f} prompts/s load {' and '.join(loads)}")

    async def _measure(self, side: str, target: Target, rate: float, number: int) -> None:
        requests = self.workload.window(rate, self.window_s, self.seed + number)
        outcomes = await offer(target, requests, BOUNDS)
        found = Window(
            side=side, rate=rate, round_number=number, outcomes=tuple(outcomes), objectives=Objectives()
        )
        self.windows.append(found)
        self.report(
            f"{side:<20} {rate:5.2f}/s {len(outcomes):>4} prompts, p50 {_latency_ms(found, 50):7.0f} ms, "
            f"p99 {_latency_ms(found, 99):7.0f} ms"
        )

    def _latency_row(self, rate: float, load: str, percent: int) -> Row:
        ours, naive = (self._latencies(side, rate, percent) for side in (OURS, NAIVE))
        return Row(
            metric=f"{self.workload.name} at {load} capacity: prefill p{percent}",
            unit="ms",
            ours=median(ours),
            runs=len(ours),
            peer=median(naive),
            peer_name=NAIVE,
            ratio=median(naive) / median(ours),
            target=HEADLINE_TARGET if percent == 99 else None,
        )

    def _latencies(self, side: str, rate: float, percent: int) -> list[float]:
        return [_latency_ms(w, percent) for w in self.windows if w.side == side and w.rate == rate]


def window_s(minutes: float, rounds: int, num_calibration: int = NUM_CALIBRATION) -> float:
    """How long a window may be, in seconds; raises ValueError if that is too short to say anything."""
    start_s = _START_S * num_calibration / NUM_CALIBRATION
    found = (60 * minutes - start_s) / (rounds * _WINDOWS_PER_ROUND)
    if found < SHORTEST_WINDOW_S:
        raise ValueError(
            f"{rounds} rounds leave {found:.1f} s for each window; take more minutes or fewer rounds"
        )
    return found


def latencies_s(outcomes: Sequence[Outcome]) -> list[float]:
    """Until the token; a prompt that got none counts with the deadline, which is less than it needed."""
    return [outcome.ttft_s if outcome.token_s else BOUNDS.deadline_s for outcome in outcomes]


def _latency_ms(window: Window, percent: int) -> float:
    return 1000 * percentile(latencies_s(window.outcomes), percent)
