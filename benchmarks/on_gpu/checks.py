"""The section of `benchmarks.gpu` that runs every kernel on awkward shapes, in all of its configurations.

Each kernel has a process of its own: one that ruins its GPU fails alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from benchmarks.on_gpu.apart import rows_apart
from benchmarks.on_gpu.section import NO_TIME, Budget, GpuRow, Section
from benchmarks.on_gpu.timer import is_usable, synchronize
from benchmarks.on_gpu.trial import TrialCase, config_choices
from benchmarks.on_gpu.trials_attention import attention_cases
from benchmarks.on_gpu.trials_kv import kv_cases
from benchmarks.on_gpu.trials_layer import layer_cases
from engine.kernels.choices import Choices

_SEED = 3
# For a kernel to be run at all, and to run one shape.
_KERNEL_S, _SHAPE_S = 3.0, 1.0
RUINED = "the device was ruined before"


def all_cases(*, is_tiny: bool) -> list[TrialCase]:
    """What is checked."""
    return [
        *layer_cases(is_tiny=is_tiny),
        *attention_cases(is_tiny=is_tiny),
        *kv_cases(is_tiny=is_tiny),
    ]


def checks(
    device: torch.device, budget: Budget, _rows: Sequence[GpuRow] = (), *, is_quick: bool = False
) -> Iterator[GpuRow]:
    """A row for each kernel, whose cases are runs of one shape in one configuration, and one for all.

    is_quick: the configurations declared first alone.
    """
    yield from checks_of(all_cases(is_tiny=device.type == "cpu"), device, budget, is_quick=is_quick)


def checks_of(
    cases: Sequence[TrialCase], device: torch.device, budget: Budget, *, is_quick: bool
) -> Iterator[GpuRow]:
    """The rows of these cases."""
    rows = []
    by_kernel = {case.kernel: [other for other in cases if other.kernel == case.kernel] for case in cases}
    for index, (kernel, of_kernel) in enumerate(by_kernel.items()):
        # What one leaves goes to those behind it.
        own = Budget.of(budget.left / (len(by_kernel) - index), budget.clock)
        row = _kernel_row(Tally(kernel, of_kernel, is_quick=is_quick), device, own)
        rows.append(row)
        yield row
    yield GpuRow(
        metric="kernels checked",
        unit="passed",
        ours=sum(row.ours or 0.0 for row in rows),
        runs=sum(row.runs for row in rows),
        also={"worst error": max(row.also["worst error"] for row in rows)},
        in_table=True,
    )


def _kernel_row(tally: Tally, device: torch.device, budget: Budget) -> GpuRow:
    """The last that a kernel's own process said of it, and what became of that process."""
    last = tally.row()
    if not budget.has(_KERNEL_S):
        return last
    name = f"check {tally.kernel}"
    for row in rows_apart(Section(name, 0.0, partial(_run, tally)), device, budget):
        # What the process itself ended with has no cases.
        last = row if row.runs else replace(last, trouble=row.trouble)
    return last


def _run(tally: Tally, device: torch.device, budget: Budget, _rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    torch.manual_seed(_SEED)
    for case in tally.cases:
        if not budget.has(_SHAPE_S):
            return
        if not tally.add(case, device):
            tally.reason = RUINED
            yield tally.row()
            return
        yield tally.row()


@dataclass(slots=True)
class Tally:
    """What became of one kernel's cases.

    reason: why those that are left were left out.  total: cases.
    """

    kernel: str
    cases: Sequence[TrialCase]
    is_quick: bool = False
    passed: int = 0
    faults: list[str] = field(default_factory=list)
    worst: float = 0.0
    reason: str = NO_TIME
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(self._count(case) for case in self.cases)

    def add(self, case: TrialCase, device: torch.device) -> bool:
        """Runs one shape in every configuration; False once nothing runs any more in this process."""
        try:
            choices, trial = self._choices(case), case.make(device)
        except Exception as problem:  # noqa: BLE001  (it is a row of the result)
            self.faults += [f"{case.name}: {type(problem).__name__}: {problem}"] * self._count(case)
            return is_usable(device)
        for index, each in enumerate(choices):
            try:
                trial.run(each)
                synchronize(device)
                words, error = trial.fault()
            except Exception as problem:  # noqa: BLE001  (it is a row of the result)
                words, error = f"{type(problem).__name__}: {problem}", math.inf
            self._add(f"{case.name}, configuration {index}: {words}" if words else "", error)
            if words and not is_usable(device):
                return False
        return True

    def row(self) -> GpuRow:
        """The worst error is a norm over that of what was expected, of those that passed."""
        row = GpuRow.check(
            f"check {self.kernel}",
            self.faults,
            passed=self.passed,
            left_out=self.total - self.passed - len(self.faults),
            reason=self.reason,
            also={"worst error": self.worst},
        )
        return replace(row, in_table=False)

    def _count(self, case: TrialCase) -> int:
        try:
            return len(self._choices(case))
        except Exception:  # noqa: BLE001  (add() says what is wrong with it)
            return 1

    def _choices(self, case: TrialCase) -> list[Choices]:
        choices = config_choices(case.launches())
        return choices[:1] if self.is_quick else choices

    def _add(self, fault: str, error: float) -> None:
        if fault:
            self.faults.append(fault)
        else:
            self.passed += 1
            self.worst = max(self.worst, error)
