"""The sections of `benchmarks.gpu` that tune the kernels, and measure each one alone at a worker's steps.

A time is the median of replays over as many sets of random tensors as fill the device's cache a few times,
or as a few gigabytes hold. What is small even so, such as the rows of a decode step, comes from the cache, as
in a step of the model, where the kernel before has just written it.

Only `tuning` measures configurations. What it has not got to, or what cannot be measured, runs as declared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.on_gpu.checks import RUINED
from benchmarks.on_gpu.facts import ceilings
from benchmarks.on_gpu.peers import COMPILED, Call, peers_of
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.shapes import kernel_steps, model_size, step_name
from benchmarks.on_gpu.timer import Times, call_times, is_usable, warm_up
from benchmarks.on_gpu.transfer_model import ModelSize, cache_shape, known_choices
from engine.kernels.block_copy import gather_blocks_launch, scatter_blocks_launch
from engine.kernels.choices import Choices
from engine.kernels.cost import Cost, Gpu, block_copy, rope_store_kv, step_costs
from engine.kernels.kernel import Launch
from engine.kernels.model_launches import Step, model_launches
from engine.kernels.model_tuning import store_of, tune_model
from engine.kernels.tuning import copied, tune
from engine.kv_cache import KVCache

TUNING = "tuning, kernels compiled"
# Steps whose kernels the short table has; of attention, more of them.
_TABLE_STEPS = ("prefill 2048",)
_TABLE_ATTENTION = ("prefill 8192", "decode 1 x 4096", "decode 32 x 1024", "decode 128 x 4096")
# What an H200 caches, several times over; and what copies of a call's tensors may take.
_FLUSHED_BYTES, _MOST_BYTES = 240e6, 6e9
_MOST_COPIES = 32
# For torch.compile, of one function; each takes seconds.
_COMPILED_STEPS = ("prefill 2048", "decode 32 x 1024")
_COMPILE_S = 12.0
# For one kernel at one step.
_SUBJECT_S = 2.0


def tuning(device: torch.device, _budget: Budget, _rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    """What a first start takes whose kernels are compiled already, and what a second one takes."""
    warm_up(device)
    for metric in (TUNING, "tuning, again"):
        began = time.perf_counter()
        choices = _tuned(device)
        yield GpuRow(
            metric=metric,
            unit="s",
            ours=time.perf_counter() - began,
            runs=1,
            also={"shapes": float(len(choices.measured))},
            in_table=metric == TUNING,
        )
    for op, crossing in choices.crossings.items():
        yield GpuRow(
            metric=f"{op}, faster than the vendor's from",
            unit="tokens",
            ours=None if crossing is None else float(crossing),
            runs=1,
            note="never" if crossing is None else "",
        )


def _tuned(device: torch.device) -> Choices:
    """The choices for the model, measured unless they were."""
    size = model_size(device)
    if device.type == "cuda":
        return tune_model(size.config, cache_shape(size, num_blocks=1), size.dtype, device)
    # Interpreted, contests with the vendor's operators and most configurations would take minutes.
    launches = list(_launches(size, kernel_steps(device)[-1], device))
    timer = partial(_interpreted_seconds, device)
    return tune(map(_with_one_configuration, launches), timer=timer, store=store_of(device))


def _with_one_configuration(launch: Launch) -> Launch:
    first = launch.kernel.configs_for(launch.shape)[0]
    return replace(launch, kernel=replace(launch.kernel, configs=(first,)))


def _interpreted_seconds(device: torch.device, call: Call) -> float:
    return call_times([call], device).median


def kernels(device: torch.device, budget: Budget, rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    """Each kernel at each step."""
    size = model_size(device)
    warm_up(device)
    bench = _Bench(device, ceilings(rows, device), known_choices(size, device), budget)
    for step in kernel_steps(device):
        try:
            for subject in _subjects(size, step, device):
                yield from _rows(bench, subject, step)
        except Exception as error:  # noqa: BLE001  (it is a row of the result)
            yield GpuRow.failed(f"kernels, {step_name(step)}", error)
        if not is_usable(device):
            yield GpuRow.not_run("kernels, the rest", RUINED)
            return


def _rows(bench: _Bench, subject: Subject, step: Step) -> Iterator[GpuRow]:
    """What goes wrong with one kernel costs no other, unless it ruins the device."""
    metric = f"{subject.name}, {step_name(step)}"
    if not bench.budget.has(_SUBJECT_S):
        yield GpuRow.not_run(metric)
        return
    try:
        yield from bench.rows(subject, step)
    except Exception as error:
        if not is_usable(bench.device):
            raise
        yield GpuRow.failed(metric, error)


@dataclass(slots=True, kw_only=True)
class Subject:
    """One kernel at one step. launches: what one call of its operator makes.  cost: of a call."""

    name: str
    launches: list[Launch]
    cost: Cost


def _subjects(size: ModelSize, step: Step, device: torch.device) -> Iterator[Subject]:
    config, itemsize = size.config, size.dtype.itemsize
    costs = step_costs(config, step, itemsize)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    subject: Subject | None = None
    for launch in _launches(size, step, device):
        name = launch.kernel.name
        if subject is not None and name == "paged_attention_reduce":
            subject.launches.append(launch)
            continue
        if subject is not None:
            yield subject
        subject = None
        if name == "add_rms_norm" and not launch.constants["HAS_DELTA"]:
            continue
        if name == "rope_store_kv":
            constants = launch.constants
            if constants["HAS_ROWS"] or (constants["HAS_STAGE"] and step.new_tokens == 1):
                continue
            has_stage = bool(constants["HAS_STAGE"])
            cost = rope_store_kv(step.num_tokens, *heads, itemsize, has_stage=has_stage)
            name += " staged" if has_stage else ""
        elif name == "block_copy":
            if step.new_tokens == 1:
                continue
            num_blocks = len(launch.arguments["block_ids_ptr"])
            cost = block_copy(num_blocks, launch.arguments["wire_ptr"][0].nbytes)
            name += ", gather" if launch.constants["IS_GATHER"] else ", scatter"
        else:
            cost = costs[name]
        subject = Subject(name=name, launches=[launch], cost=cost)
    if subject is not None:
        yield subject


def _launches(size: ModelSize, step: Step, device: torch.device) -> Iterator[Launch]:
    """Over one layer's cache; what copies blocks, over all layers'."""
    num_blocks = step.num_sequences * -(-step.context // size.block_size)
    one_layer = KVCache(cache_shape(size, num_blocks, num_layers=1), device).logical
    for launch in model_launches(size.config, step, one_layer, size.dtype):
        if launch.kernel.name != "block_copy":
            yield launch
    if step.new_tokens > 1:
        yield from _block_copies(size, num_blocks, device)


def _block_copies(size: ModelSize, num_blocks: int, device: torch.device) -> Iterator[Launch]:
    cache = KVCache(cache_shape(size, num_blocks), device).logical
    wire, block_ids_n = torch.zeros_like(cache), torch.arange(num_blocks, dtype=torch.int32, device=device)
    checksums_n = torch.zeros(num_blocks, dtype=torch.int64, device=device)
    yield gather_blocks_launch(cache, block_ids_n, wire, checksums_n)
    yield scatter_blocks_launch(wire, block_ids_n, cache, checksums_n)


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all measurements have in common. gpu: what the device was measured to reach."""

    device: torch.device
    gpu: Gpu
    choices: Choices
    budget: Budget

    def rows(self, subject: Subject, step: Step) -> Iterator[GpuRow]:
        """One kernel beside its peers; then the peers that do not run, and a time that cannot be."""
        copies = [_randomized(subject.launches) for _ in range(_num_copies(subject, self.device))]
        ours = call_times([partial(self.choices.run, *launches) for launches in copies], self.device)
        peers_s, troubles = self._peers([launches[0] for launches in copies], step)
        row = self._row(subject, step, ours, peers_s)
        yield row
        for name, error in troubles.items():
            words = f"{type(error).__name__}: {error}"
            yield replace(GpuRow.not_run(f"{row.metric}: {name}", words), in_table=False)
        num_bytes = len(copies) * (subject.cost.read + subject.cost.written)
        if row.also["share"] > 1.0 and num_bytes >= _FLUSHED_BYTES:
            yield GpuRow.said(row.metric, f"faster than the ceiling: {row.also['share']:.3g}", in_table=True)

    def _row(self, subject: Subject, step: Step, ours: Times, peers_s: Mapping[str, float]) -> GpuRow:
        """A time beside the fastest peer's, and beside the least that its bytes or operations take."""
        num_bytes, ours_s = subject.cost.read + subject.cost.written, ours.median
        is_bound_by_bytes = num_bytes / self.gpu.bandwidth > subject.cost.flops / self.gpu.flops
        best = min(peers_s, key=lambda name: peers_s[name]) if peers_s else None
        return GpuRow(
            metric=f"{subject.name}, {step_name(step)}",
            unit="ms",
            ours=1e3 * ours_s,
            runs=ours.runs,
            peer=1e3 * peers_s[best] if best else None,
            peer_name=best,
            ratio=peers_s[best] / ours_s if best else None,
            also={
                "share": subject.cost.seconds(self.gpu) / ours_s,
                **({"GB/s": num_bytes / ours_s / 1e9} if is_bound_by_bytes else {}),
                **({} if is_bound_by_bytes else {"TFLOP/s": subject.cost.flops / ours_s / 1e12}),
                **ours.spread(),
                **{f"{name} ms": 1e3 * seconds for name, seconds in peers_s.items()},
            },
            in_table=_is_in_table(subject, step),
        )

    def _peers(self, launches: Sequence[Launch], step: Step) -> tuple[dict[str, float], dict[str, Exception]]:
        """Seconds by name, and what went wrong. Raises what ruins the device."""
        seconds: dict[str, float] = {}
        troubles: dict[str, Exception] = {}
        made = [peers_of(launch, step) for launch in launches]
        for name in made[0]:
            if name == COMPILED and not self._compiles(step):
                continue
            try:
                seconds[name] = call_times([peers[name] for peers in made], self.device).median
            except Exception as error:
                if not is_usable(self.device):
                    raise
                troubles[name] = error
        return seconds, troubles

    def _compiles(self, step: Step) -> bool:
        # A compiler is of no use to what is interpreted.
        has_time = self.device.type == "cuda" and self.budget.has(_COMPILE_S)
        return has_time and step_name(step) in _COMPILED_STEPS


def _is_in_table(subject: Subject, step: Step) -> bool:
    steps = _TABLE_STEPS + (_TABLE_ATTENTION if "attention" in subject.name else ())
    return step_name(step) in steps and subject.name not in ("rope_store_kv", "block_copy, scatter")


def _num_copies(subject: Subject, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    held = sum(
        argument.nbytes
        for launch in subject.launches
        for argument in launch.arguments.values()
        if isinstance(argument, torch.Tensor)
    )
    wanted = -(-_FLUSHED_BYTES // (subject.cost.read + subject.cost.written))
    return int(max(1, min(wanted, _MOST_COPIES, _MOST_BYTES // held)))


def _randomized(launches: Sequence[Launch]) -> list[Launch]:
    """Copies of the calls of one operator, on random numbers, tokens and blocks."""
    copies: list[Launch] = []
    memo: dict[int, torch.Tensor] = {}
    for launch in launches:
        copy = copied(launch)
        # What one call hands to the next is one tensor here too.
        arguments = {name: memo.get(id(launch.arguments[name]), own) for name, own in copy.arguments.items()}
        copies.append(replace(copy, arguments=arguments))
        memo |= {
            id(argument): arguments[name]
            for name, argument in launch.arguments.items()
            if isinstance(argument, torch.Tensor)
        }
        _randomize(arguments)
    return copies


def _randomize(arguments: Mapping[str, Any]) -> None:
    for name, argument in arguments.items():
        if name == "token_ids_ptr":
            argument.random_(0, len(arguments["embedding_ptr"]))
        elif name in ("tables_ptr", "block_ids_ptr"):
            argument.copy_(torch.randperm(argument.numel(), device=argument.device).view(argument.shape))
        elif isinstance(argument, torch.Tensor) and argument.is_floating_point():
            argument.normal_()
