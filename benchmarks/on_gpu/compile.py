"""The section of `benchmarks.gpu` that compiles what the others run, on all cores at once.

Triton compiles a kernel at its first call, one after the other; what a process finds in the cache on disk it
loads. So the calls are found on the meta device and compiled ahead, and the later sections find them there.
The row "a first start's" says what a worker's first start takes of a core without that.

Triton 3.6 also compiles a launcher in C for each signature, at its first launch; later ones have one for all.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.pool import Pool

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver

from benchmarks.on_gpu.agreement import CHECKED_STEPS
from benchmarks.on_gpu.apart import end_with_parent
from benchmarks.on_gpu.checks import all_cases
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.shapes import LLAMA_8B, MODEL_STEPS, STEPS
from benchmarks.on_gpu.transfer_model import SIZES, ModelSize, cache_shape
from engine.kernels.kernel import Config, Launch
from engine.kernels.model_launches import Step, model_launches, scatters_of_foreign_blocks
from engine.kernels.model_tuning import model_steps as tuning_steps

# A call in one configuration, and whether a first start of a model needs it.
Work = tuple[Launch, Config, bool]

_META = torch.device("meta")
_POLL_S = 0.2
# Of the calls' caches: enough blocks for any step.
_NUM_BLOCKS = 1 << 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Their programs take seconds, the others' less than one: the last to begin decides when all are done.
_SLOW = ("prefill_attention", "paged_attention", "embed_rms_norm_qkv")
# Of the transfer's small model: whole chunks, the last ones, and what decodes behind them.
_EXACT_STEPS = (
    *(Step(num_sequences=1, new_tokens=new, context=context) for new, context in ((512, 512), (500, 500))),
    *(Step(num_sequences=1, new_tokens=new, context=1999) for new in (463, 1)),
    *(Step(num_sequences=1, new_tokens=new, context=new) for new in (16, 1)),
    Step(num_sequences=1, new_tokens=1, context=505),
)

_work: list[Work] = []


def compilation(device: torch.device, budget: Budget, _rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    """How many programs were compiled, and what that took."""
    is_tiny = device.type == "cpu"
    work = list(all_work(is_tiny=is_tiny))
    if triton.knobs.runtime.interpret:
        yield GpuRow.not_run("compiled ahead", f"interpreted; {len(work)} calls")
        return
    # Workers come first: a process that has a GPU must not be forked.
    context = multiprocessing.get_context("fork")
    with context.Pool(os.cpu_count(), initializer=_adopt, initargs=(work, os.getpid())) as pool:
        yield from _compiled(pool, work, driver.active.get_current_target(), budget)


def all_work(*, is_tiny: bool) -> Iterator[Work]:
    """What tuning, the checks and the steps of the models will call, the first start's before the rest."""
    size = replace(LLAMA_8B, dtype=torch.bfloat16)
    steps = tuning_steps(size.config)
    steps = steps[-2:] if is_tiny else steps
    yield from _in_every_configuration(_step_launches(size, steps), is_first=True)
    if not is_tiny:
        yield from _in_every_configuration(_step_launches(size, (*STEPS, *MODEL_STEPS)), is_first=False)
        # What nobody measures runs as declared.
        yield from _as_declared(_foreign_scatters(size))
        exact = replace(LLAMA_8B, dtype=torch.float32)
        yield from _as_declared(_step_launches(exact, CHECKED_STEPS))
        yield from _as_declared(_step_launches(SIZES["exact"], _EXACT_STEPS))
    for case in all_cases(is_tiny=is_tiny):
        yield from _in_every_configuration(case.launches(), is_first=False)


def unique(work: Iterable[Work], target: GPUTarget) -> list[int]:
    """Places in the work of calls that the compiler is given, each once."""
    places: dict[str, int] = {}
    for place, (launch, config, _) in enumerate(work):
        source, options = launch.source(target, config)
        places.setdefault(f"{source.hash()} {options}", place)
    return list(places.values())


def slow_first(places: Iterable[int], work: Sequence[Work]) -> list[int]:
    """The order in which many compilers are given the work."""
    rank = {name: number for number, name in enumerate(_SLOW)}
    return sorted(places, key=lambda place: rank.get(work[place][0].kernel.name, len(rank)))


def _as_declared(launches: Iterable[Launch]) -> Iterator[Work]:
    for launch in launches:
        yield launch, launch.kernel.configs_for(launch.shape)[0], False


def _in_every_configuration(launches: Iterable[Launch], *, is_first: bool) -> Iterator[Work]:
    for launch in launches:
        for config in launch.kernel.configs_for(launch.shape):
            yield launch, config, is_first


def _step_launches(size: ModelSize, steps: Iterable[Step]) -> Iterator[Launch]:
    shape = cache_shape(size, _NUM_BLOCKS)
    cache = torch.empty(shape.physical, dtype=shape.dtype, device=_META)
    for step in steps:
        yield from model_launches(size.config, step, cache, size.dtype)


def _foreign_scatters(size: ModelSize) -> Iterator[Launch]:
    """What a first start loads beside what it measures."""
    cache = torch.empty(cache_shape(size, _NUM_BLOCKS).physical, dtype=size.dtype, device=_META)
    return scatters_of_foreign_blocks(size.config, cache, _DTYPES)


def _compiled(pool: Pool, work: list[Work], target: GPUTarget, budget: Budget) -> Iterator[GpuRow]:
    places = slow_first(unique(work, target), work)
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
        metric="a first start's compiling",
        unit="CPU s",
        ours=sum(first),
        runs=len(first),
        also={"longest s": max(first, default=0.0)},
        in_table=True,
    )


def _adopt(work: list[Work], parent: int) -> None:
    end_with_parent(parent)
    _work.extend(work)


def _compile(place: int, target: GPUTarget) -> tuple[float, str]:
    """Seconds of a core, and what went wrong."""
    launch, config, _ = _work[place]
    began, words = _core_seconds(), ""
    try:
        build_launcher(launch, config, target, launch.compile(target, config))
    except Exception as error:  # noqa: BLE001  (it is a row of the result)
        words = f"{launch.kernel.name} ({config}): {type(error).__name__}: {error}"
    return _core_seconds() - began, words


def build_launcher(launch: Launch, config: Config, target: GPUTarget, program: CompiledKernel) -> None:
    """Has what launches a program compiled as well, where a Triton has one for each signature."""
    if target.backend == "cuda" and hasattr(nvidia, "make_launcher"):
        source, _ = launch.source(target, config)
        nvidia.CudaLauncher(source, program.metadata)


def _core_seconds() -> float:
    """That this process and the programs that it ran have computed: no clock, since all cores are busy."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
