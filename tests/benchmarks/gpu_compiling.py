"""What a test of `benchmarks.on_gpu.compile` runs in a process of its own, where Triton is not interpreted.

Compiles calls for a GPU that is not there, then has Triton's dispatcher compile them as it would at their
first launch. Prints as JSON how many programs the cache on disk had before and after that, and how many calls
the dispatcher was given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.on_gpu.compile import Work, all_work, unique
from benchmarks.on_gpu.trials_kv import kv_cases

TARGET = GPUTarget("cuda", 90, 32)
TUNED = ("add_rms_norm", "rope_store_kv")
CHECKED = ("rope_store_kv", "block_copy")


class AbsentDriver:
    """A driver without a device, which is all that a dispatcher needs that does not launch."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def chosen() -> list[Work]:
    """The first call of some kernels in a first start's tuning, and of others in the checks."""
    work = [next(each for each in all_work(is_tiny=False) if each[0].kernel.name == name) for name in TUNED]
    assert all(is_first for _, _, is_first in work)
    for name in CHECKED:
        case = next(case for case in kv_cases(is_tiny=False) if case.kernel == name)
        launch = case.launches()[0]
        work.append((launch, launch.kernel.configs_for(launch.shape)[0], False))
    return work


def num_programs() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).iterdir()))


def main() -> None:
    work = chosen()
    for place in unique(work, TARGET):
        launch, config, _ = work[place]
        launch.compile(TARGET, config)
    compiled = num_programs()
    driver.set_active(AbsentDriver())
    for launch, config, _ in work:
        launch.kernel.function.warmup(grid=launch.grid(config.constants), **launch._bound(config))
    json.dump({"calls": len(work), "compiled": compiled, "afterwards": num_programs()}, sys.stdout)


if __name__ == "__main__":
    main()
