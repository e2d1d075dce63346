"""The section of `benchmarks.gpu` that compiles what the others run, on all cores at once.

Triton compiles a kernel at its first call, one after the other; what a process finds in the cache on disk it
loads. So the calls are found on the meta device and compiled ahead, and the later sections find them there.
The row "one by one" says what a worker's first start takes without that.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.pool import Pool

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.on_gpu.checks import all_cases
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.shapes import LLAMA_8B, STEPS
from benchmarks.on_gpu.transfer_model import ModelSize
from engine.kernels.kernel import Config, Launch
from engine.kernels.model_launches import Step, model_launches
from engine.kernels.model_tuning import STEPS as TUNING_STEPS
from engine.kv_cache import CacheShape

# A call in one configuration, and whether a first start of a model needs it.
Work = tuple[Launch, Config, bool]

_META = torch.device("meta")
_POLL_S = 0.2
# Of the calls' caches: enough blocks for any step.
_NUM_BLOCKS = 1 << 16

_work: list[Work] = []


def compilation(device: torch.device, budget: Budget) -> Iterator[GpuRow]:
    """How many programs were compiled, and what that took."""
    is_tiny = device.type == "cpu"
    work = list(all_work(is_tiny=is_tiny))
    if triton.knobs.runtime.interpret:
        yield GpuRow.not_run("compiled ahead", f"interpreted; {len(work)} calls")
        return
    # Workers come first: a process that has a GPU must not be forked.
    context = multiprocessing.get_context("fork")
    with context.Pool(os.cpu_count(), initializer=_adopt, initargs=(work,)) as pool:
        yield from _compiled(pool, work, driver.active.get_current_target(), budget)


def all_work(*, is_tiny: bool) -> Iterator[Work]:
    """What tuning, the checks and the steps of the models will call, the first start's before the rest."""
    size = replace(LLAMA_8B, dtype=torch.bfloat16)
    steps = TUNING_STEPS[-2:] if is_tiny else TUNING_STEPS
    yield from _in_every_configuration(_step_launches(size, steps), is_first=True)
    if not is_tiny:
        yield from _in_every_configuration(_step_launches(size, STEPS), is_first=False)
    for case in all_cases(is_tiny=is_tiny):
        yield from _in_every_configuration(case.launches(), is_first=False)


def unique(work: Iterable[Work], target: GPUTarget) -> list[int]:
    """Places in the work of calls that the compiler is given, each once."""
    places: dict[str, int] = {}
    for place, (launch, config, _) in enumerate(work):
        source, options = launch.source(target, config)
        places.setdefault(f"{source.hash()} {options}", place)
    return list(places.values())


def _in_every_configuration(launches: Iterable[Launch], *, is_first: bool) -> Iterator[Work]:
    for launch in launches:
        for config in launch.kernel.configs_for(launch.shape):
            yield launch, config, is_first


def _step_launches(size: ModelSize, steps: Iterable[Step]) -> Iterator[Launch]:
    config = size.config
    shape = CacheShape(
        num_blocks=_NUM_BLOCKS,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=size.block_size,
        head_dim=config.head_dim,
        dtype=size.dtype,
    )
    cache = torch.empty(shape.physical, dtype=shape.dtype, device=_META)
    for step in steps:
        yield from model_launches(config, step, cache, size.dtype)


def _compiled(pool: Pool, work: list[Work], target: GPUTarget, budget: Budget) -> Iterator[GpuRow]:
    places = unique(work, target)
    began = time.perf_counter()
    results = [pool.apply_async(_compile, (place, target)) for place in places]
    while budget.left and not all(result.ready() for result in results):
        time.sleep(_POLL_S)
    wall_s = time.perf_counter() - began
    done = {place: result.get() for place, result in zip(places, results, strict=True) if result.ready()}
    faults = [words for _, words in done.values() if words]
    row = GpuRow.check("compiled ahead", faults, passed=len(done) - len(faults), also={"s": wall_s})
    yield replace(row, in_table=False)
    if len(done) < len(results):
        yield GpuRow.not_run("compiled ahead, the rest", f"{len(results) - len(done)}, no time left")
    first = [seconds for place, (seconds, _) in done.items() if work[place][2]]
    yield GpuRow(
        metric="one by one, a first start's",
        unit="s",
        ours=sum(first),
        runs=len(first),
        also={"longest s": max(first, default=0.0)},
        in_table=True,
    )


def _adopt(work: list[Work]) -> None:
    _work.extend(work)


def _compile(place: int, target: GPUTarget) -> tuple[float, str]:
    """Seconds, and what went wrong."""
    launch, config, _ = _work[place]
    began, words = time.perf_counter(), ""
    try:
        launch.compile(target, config)
    except Exception as error:  # noqa: BLE001  (it is a row of the result)
        words = f"{launch.kernel.name} ({config}): {type(error).__name__}: {error}"
    return time.perf_counter() - began, words
