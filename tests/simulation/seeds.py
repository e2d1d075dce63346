"""Many seeds on all cores: each is run and judged in a process of a pool, and comes back as a record.

Owns the pool and what a seed must have had to count: requests, faults and a resume.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.simulation.plan import Plan, draw
from tests.simulation.run import Result, report, run, shrink
from tests.simulation.sometimes import POINTS

LEAST_REQUESTS, LEAST_FAULTS, LEAST_RESUMES = 50, 3, 1
# Every so many seeds one is run twice, and must repeat itself.
TWICE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one seed came to. report: for people, of a failure; cpu_s: of its process."""

    seed: int
    defects: tuple[str, ...]
    report: str
    line: str
    outcomes: Counter[str]
    sometimes: Counter[str]
    cpu_s: float


@dataclass(slots=True)
class Summary:
    """All seeds of one call. wall_s, cpu_s: time they took."""

    num_seeds: int = 0
    failed: list[Record] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    sometimes: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, record: Record) -> None:
        self.num_seeds += 1
        self.outcomes += record.outcomes
        self.sometimes += record.sometimes
        self.cpu_s += record.cpu_s
        if record.defects:
            self.failed.append(record)

    @property
    def never(self) -> list[str]:
        """Points that no seed has reached."""
        return [point for point in POINTS if not self.sometimes[point]]

    def __str__(self) -> str:
        of_cpu, of_wall = self.num_seeds / self.cpu_s, self.num_seeds / self.wall_s
        return (
            f"{self.num_seeds} seeds, {len(self.failed)} failed, "
            f"{of_cpu:.2f} seeds/s of CPU, {of_wall:.2f} of wall time"
        )


@contextmanager
def process_pool(jobs: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes for simulations, by default one per core; what has not begun at the end is dropped."""
    # Spawned: a fork would inherit torch's threads and whatever the caller's tests have left behind.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs or os.cpu_count(), context, torch.set_num_threads, (1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def simulate(
    pool: ProcessPoolExecutor,
    seeds: Iterable[int],
    *,
    num_requests: int | None = None,
    shrinks: bool = True,
    told: Callable[[Record], None] = lambda record: None,
) -> Summary:
    """Runs the seeds; told: called with each record, in their order."""
    summary, started = Summary(), time.perf_counter()
    for record in pool.map(partial(judged, num_requests=num_requests, shrinks=shrinks), seeds):
        summary.add(record)
        told(record)
    summary.wall_s = time.perf_counter() - started
    return summary


def judged(seed: int, *, num_requests: int | None = None, shrinks: bool = True) -> Record:
    """Runs one seed and says what is wrong with it."""
    started = time.process_time()
    plan = draw(seed, num_requests)
    result = run(plan)
    cpu_s = time.process_time() - started
    defects = result.defects or tuple(shortcomings(result, num_requests or LEAST_REQUESTS))
    if not defects and seed % TWICE == 0 and run(plan).digest != result.digest:
        defects = ("it does not repeat itself",)
    return Record(
        seed=seed,
        defects=defects,
        report=_report(result, defects, shrinks=shrinks) if defects else "",
        line=_line(result),
        outcomes=result.outcomes,
        sometimes=result.sometimes,
        cpu_s=cpu_s,
    )


def shortcomings(result: Result, least_requests: int = LEAST_REQUESTS) -> Iterator[str]:
    """Why a run that broke no law still proves too little."""
    plan: Plan = result.plan
    found = (
        ("requests", len(plan.requests), least_requests),
        ("faults", len(plan.faults), LEAST_FAULTS),
        ("resumes", result.num_resumes, LEAST_RESUMES),
    )
    for what, count, least in found:
        if count < least:
            yield f"the plan is too tame: {count} {what}, at least {least} are due"


def _report(result: Result, defects: tuple[str, ...], *, shrinks: bool) -> str:
    if not result.defects:
        return f"seed {result.plan.seed} failed: {'; '.join(defects)}"
    return report(result, shrink(result.plan) if shrinks else None)


def _line(result: Result) -> str:
    outcomes = "  ".join(f"{name} {count}" for name, count in sorted(result.outcomes.items()))
    return (
        f"seed {result.plan.seed}: {result.num_events} events, trace {result.digest}, "
        f"{len(result.plan.faults)} faults, {result.num_resumes} resumes; {outcomes}"
    )
