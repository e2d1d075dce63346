"""The section of `benchmarks.gpu` that runs every kernel on awkward shapes, in all of its configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.timer import synchronize
from benchmarks.on_gpu.trial import TrialCase, config_choices
from benchmarks.on_gpu.trials_attention import attention_cases
from benchmarks.on_gpu.trials_kv import kv_cases
from benchmarks.on_gpu.trials_layer import layer_cases

_SEED = 3


def all_cases(*, is_tiny: bool) -> list[TrialCase]:
    """What is checked."""
    return [
        *layer_cases(is_tiny=is_tiny),
        *attention_cases(is_tiny=is_tiny),
        *kv_cases(is_tiny=is_tiny),
    ]


def checks(device: torch.device, budget: Budget) -> Iterator[GpuRow]:
    """A row for each kernel, whose cases are runs of one shape in one configuration, and one for all."""
    torch.manual_seed(_SEED)
    cases = all_cases(is_tiny=device.type == "cpu")
    tallies = []
    for kernel in dict.fromkeys(case.kernel for case in cases):
        of_kernel = [case for case in cases if case.kernel == kernel]
        tally = Tally(kernel)
        for case in of_kernel:
            if not budget.has(1.0):
                tally.num_left_out += 1
                continue
            tally.add(case, device)
        yield tally.row()
        tallies.append(tally)
    yield GpuRow(
        metric="kernels checked",
        unit="passed",
        ours=float(sum(tally.passed for tally in tallies)),
        runs=sum(tally.passed + len(tally.faults) for tally in tallies),
        also={"worst error": max(tally.worst for tally in tallies)},
        in_table=True,
    )


@dataclass(slots=True)
class Tally:
    """What became of one kernel's cases. num_left_out: shapes for which there was no time."""

    kernel: str
    passed: int = 0
    faults: list[str] = field(default_factory=list)
    worst: float = 0.0
    num_left_out: int = 0

    def add(self, case: TrialCase, device: torch.device) -> None:
        """Runs one shape in every configuration."""
        try:
            choices = config_choices(case.launches())
            trial = case.make(device)
        except Exception as problem:  # noqa: BLE001  (it is a row of the result)
            self._add(f"{case.name}: {type(problem).__name__}: {problem}", math.inf)
            return
        for index, each in enumerate(choices):
            try:
                trial.run(each)
                synchronize(device)
                words, error = trial.fault()
            except Exception as problem:  # noqa: BLE001  (it is a row of the result)
                words, error = f"{type(problem).__name__}: {problem}", math.inf
            self._add(f"{case.name}, configuration {index}: {words}" if words else "", error)

    def row(self) -> GpuRow:
        """The worst error is a norm over that of what was expected, of those that passed."""
        if self.num_left_out and not self.faults:
            return GpuRow.not_run(
                f"check {self.kernel}",
                f"{self.num_left_out} shapes, no time left; {self.passed} cases passed",
            )
        row = GpuRow.check(
            f"check {self.kernel}", self.faults, passed=self.passed, also={"worst error": self.worst}
        )
        return replace(row, in_table=False)

    def _add(self, fault: str, error: float) -> None:
        if fault:
            self.faults.append(fault)
        else:
            self.passed += 1
            self.worst = max(self.worst, error)
