"""The sections of `benchmarks.gpu`, their order, and how they share the time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.on_gpu import transfer
from benchmarks.on_gpu.apart import rows_apart
from benchmarks.on_gpu.checks import checks
from benchmarks.on_gpu.compile import compilation
from benchmarks.on_gpu.facts import facts
from benchmarks.on_gpu.kernels import kernels, tuning
from benchmarks.on_gpu.model import compiled, model
from benchmarks.on_gpu.section import Budget, GpuRow, Section

# Less is not worth a process.
_LEAST_S = 1.0


def planned(*, is_quick: bool) -> tuple[Section, ...]:
    """All of them. Seconds are in proportion: they are scaled to what there is.

    is_quick: kernels are checked in the configurations that they declare first.
    """
    return (
        Section("facts", 10, facts),
        Section("compile", 40, compilation),
        Section("checks", 30, partial(checks, is_quick=is_quick)),
        Section("tuning", 25, tuning),
        Section("kernels", 35, kernels),
        Section("model", 45, model),
        # What it measures is a peer: if that takes too long, nothing of ours has failed.
        Section("compiled", 45, compiled, is_optional=True),
        Section("transfer", 50, transfer.run),
    )


def measured(
    device: str,
    seconds: float,
    names: Sequence[str] = (),
    *,
    sections: Sequence[Section],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[GpuRow]:
    """The rows of the sections of such names, or of all, as they come.

    What one leaves of its time goes to those behind it. Raises ValueError for a name that there is not.
    """
    if unknown := set(names) - {section.name for section in sections}:
        raise ValueError(f"there is no section {min(unknown)}")
    if device == "cpu":
        # An interpreted kernel's operators are too small to share.
        torch.set_num_threads(1)
    chosen = [section for section in sections if not names or section.name in names]
    scale, end = seconds / sum(section.seconds for section in chosen), clock()
    rows: list[GpuRow] = []
    for section in chosen:
        end += scale * section.seconds
        budget = Budget(end, clock)
        if not budget.has(_LEAST_S):
            yield GpuRow.not_run(section.name)
            continue
        began = clock()
        print(f"{section.name}: {budget.left:.0f} s", file=sys.stderr, flush=True)
        for row in rows_apart(section, torch.device(device), budget, tuple(rows)):
            rows.append(row)
            yield row
        yield GpuRow(metric=f"section {section.name}", unit="s", ours=clock() - began, runs=1)
