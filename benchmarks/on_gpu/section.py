"""What a section of `benchmarks.gpu` is to it: rows that say what became of it, and a share of the time.

A section yields its rows as they come, so that what follows an exception is lost and nothing before it. It is
told its device and how long it may take, asks the budget before each thing that takes seconds, and yields
GpuRow.not_run() for what it leaves out. Knows no section and no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.report import Row

if TYPE_CHECKING:
    import torch

# The row that names the device.
DEVICE = "device"
NO_TIME = "no time left"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow(Row):
    """A row, or why there is none.

    trouble: "failed: ..." or "not run: ..."; empty for what was measured or checked and is good.
    note: what is words and no figure, such as the name of a device.
    also: further figures, by name and unit, such as "GB/s".  in_table: whether the short table at the end
        has it; it has whatever failed anyway.
    """

    trouble: str = ""
    note: str = ""
    also: Mapping[str, float] = field(default_factory=dict)
    in_table: bool = False

    @property
    def has_failed(self) -> bool:
        """What was not run for want of time has not."""
        return self.trouble.startswith("failed")

    @classmethod
    def check(
        cls,
        metric: str,
        faults: list[str],
        *,
        passed: int,
        left_out: int = 0,
        reason: str = NO_TIME,
        also: Mapping[str, float] | None = None,
    ) -> GpuRow:
        """Cases that passed, what is wrong with others, and how many were left out, for what reason."""
        total = passed + len(faults) + left_out
        shown = "; ".join(faults[:3]) + ("; ..." if len(faults) > 3 else "")
        trouble = f"not run: {left_out} of {total}, {reason}" if left_out else ""
        return cls(
            metric=metric,
            unit="passed",
            ours=float(passed),
            runs=total,
            trouble=f"failed: {len(faults)} of {total}: {shown}" if faults else trouble,
            also=also or {},
            in_table=True,
        )

    @classmethod
    def failed(cls, metric: str, error: BaseException | str) -> GpuRow:
        """Of something that raised, or went wrong in words."""
        words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return cls(metric=metric, unit="", ours=None, runs=0, trouble=f"failed: {' '.join(words.split())}")

    @classmethod
    def not_run(cls, metric: str, reason: str = NO_TIME) -> GpuRow:
        """Of something left out."""
        words = " ".join(reason.split())
        return cls(metric=metric, unit="", ours=None, runs=0, trouble=f"not run: {words}", in_table=True)

    @classmethod
    def said(cls, metric: str, note: str, *, in_table: bool = False) -> GpuRow:
        """Words."""
        return cls(metric=metric, unit="", ours=None, runs=0, note=note, in_table=in_table)


@dataclass(frozen=True, slots=True)
class Budget:
    """Time until a moment of a clock. end: in the clock's seconds."""

    end: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Budget:
        """From now on."""
        return cls(clock() + seconds, clock)

    @property
    def left(self) -> float:
        """Seconds, never less than none."""
        return max(0.0, self.end - self.clock())

    def has(self, seconds: float) -> bool:
        """Whether as much is left."""
        return self.left >= seconds


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the benchmark. seconds: what it is allowed, beside what those before it have left.

    run: of a device, a budget, and the rows of the sections before it. On "cpu" kernels are interpreted:
        sizes are tiny, and times mean nothing.
    is_optional: whether to be cut off for want of time is no failure of it.
    """

    name: str
    seconds: float
    run: Callable[[torch.device, Budget, Sequence[GpuRow]], Iterable[GpuRow]]
    is_optional: bool = False
