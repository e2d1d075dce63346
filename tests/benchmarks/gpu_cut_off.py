"""What a test of `benchmarks/gpu.py` runs in a process of its own, to end it before it is done.

The benchmark with a plan whose one section has a row, starts another process, and never ends. A file then has
the ids of both. Without torch.

    python -m tests.benchmarks.gpu_cut_off FILE [options of benchmarks/gpu.py]
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.on_gpu.apart import rows_apart
from benchmarks.on_gpu.section import Budget, GpuRow, Section


def hang(*_: object) -> Iterator[GpuRow]:
    yield GpuRow(metric="first", unit="ms", ours=1.5, runs=1)
    child = subprocess.Popen(["sleep", "600"])
    written = FILE.with_suffix(".part")
    written.write_text(f"{os.getpid()} {child.pid}")
    written.rename(FILE)
    time.sleep(600)


def measured(*_: object, sections: list[Section]) -> Iterator[GpuRow]:
    device: Any = SimpleNamespace(type="cpu")
    return rows_apart(sections[0], device, Budget.of(60))


if __name__ == "__main__":
    FILE = Path(sys.argv.pop(1))
    plan: Any = ModuleType("benchmarks.on_gpu.plan")
    plan.planned = lambda is_quick: [Section("hangs", 1.0, hang)]
    plan.measured = measured
    sys.modules[plan.__name__] = plan
    runpy.run_module("benchmarks.gpu", run_name="__main__")
