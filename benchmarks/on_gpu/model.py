"""The sections of `benchmarks.gpu` that run whole steps of a Llama-3.1-8B-shaped model with random weights.

A step is measured three ways: by the clock from its batch to its sampled tokens; by what the host takes to
launch it; and as a recorded graph, which takes the host out: what a device would do if nothing held it up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from benchmarks.on_gpu.agreement import agreement
from benchmarks.on_gpu.batches import uniform_batch
from benchmarks.on_gpu.checks import RUINED
from benchmarks.on_gpu.facts import ceilings
from benchmarks.on_gpu.formulas import decode_bytes, kv_bytes, prefill_flops, weight_bytes
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.shapes import compiled_steps, model_size, model_steps, step_name
from benchmarks.on_gpu.timer import (
    Times,
    call_times,
    data_sheet,
    device_name,
    is_usable,
    launch_seconds,
    wall_times,
    warm_up,
)
from benchmarks.on_gpu.transfer_model import ModelSize, known_choices, make_runner
from engine.batch import ForwardBatch
from engine.kernels.cost import Gpu
from engine.kernels.model_launches import Step
from engine.kv_cache import available_bytes
from engine.model.forward_pass import ForwardPass
from engine.model.plain_pass import PlainPass
from engine.runner import ModelRunner

LAYERS_COMPILED = "layers compiled by torch"
# Milliseconds on an H200, added up from measured tables of operators in bfloat16.
TABLES = "tables"
_TABLES_MS = {
    "prefill 256": 7.3,
    "prefill 1024": 21.4,
    "prefill 2048": 41.9,
    "decode 1 x 1024": 5.2,
    "decode 128 x 1024": 10.1,
}
# What the same tables come to there as a share of the data sheet's bandwidth.
_SHARES = {"decode 128 x 4096": 0.83}
# Steps of which the short table says where the time goes.
_TABLE_HOST = ("decode 1 x 1024", "decode 32 x 1024")
# Steps that it leaves out.
_LESSER = ("prefill 128", "decode 8 x 1024")
# Beside the weights and the cache: what a step needs.
_SPARE_BYTES = 8 << 30
_STEP_S = 3.0


def model(device: torch.device, budget: Budget, rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    """Whether both passes agree; then each step."""
    size = model_size(device)
    warm_up(device)
    yield from agreement(size, known_choices(size, device), device)
    torch.cuda.empty_cache()
    steps = _fitting(model_steps(device), size, device)
    bench = Bench(make_runner(size, _most_tokens(steps, size), device), device, ceilings(rows, device))
    for step in model_steps(device):
        if step not in steps:
            yield GpuRow.not_run(step_name(step), "no room in the device's memory")
        elif not budget.has(_STEP_S):
            yield GpuRow.not_run(step_name(step))
        else:
            try:
                yield from bench.rows(step)
            except Exception as error:  # noqa: BLE001  (it is a row of the result)
                yield GpuRow.failed(step_name(step), error)
            if not is_usable(device):
                yield GpuRow.not_run("steps, the rest", RUINED)
                return


def compiled(device: torch.device, budget: Budget, rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    """The layers as torch.compile's programs beside the fused ones, at some steps."""
    size, steps = model_size(device), compiled_steps(device)
    warm_up(device)
    runner = make_runner(size, _most_tokens(list(steps), size), device)
    bench = Bench(runner, device, ceilings(rows, device))
    if device.type == "cpu":
        # Its rows are those of eager layers.
        yield GpuRow.not_run(LAYERS_COMPILED, "a CPU")
    else:
        began = time.perf_counter()
        compilation = runner.compile()
        if compilation is None:
            yield GpuRow.failed(LAYERS_COMPILED, "they stay eager; the log says why")
            return
        bench.plain = runner.model.forward_pass
        seconds = time.perf_counter() - began
        yield GpuRow(metric=LAYERS_COMPILED, unit="s", ours=seconds, runs=compilation.num_programs)
    for step in steps:
        if budget.has(_STEP_S):
            yield bench.compiled_row(step)
        else:
            yield GpuRow.not_run(f"{step_name(step)}, compiled")


class Bench:
    """One model with two passes. plain: what the fused one is compared with.

    measured: what the device was measured to reach.
    """

    def __init__(self, runner: ModelRunner, device: torch.device, measured: Gpu) -> None:
        self.plain: ForwardPass = PlainPass(runner.model.config)
        self._runner = runner
        self._device = device
        self._fused = runner.model.forward_pass
        self._measured = measured
        # Zeros would be faster.
        runner.cache.data.normal_()

    def rows(self, step: Step) -> Iterator[GpuRow]:
        """A step by the clock, and where its time goes; then a time that cannot be."""
        batch, name = uniform_batch(step, self._runner), step_name(step)
        times = self._times(batch)
        fused_s, plain_s = times["fused"].median, times["plain"].median
        peer_name, peer_s = self._anchor(step) or ("plain", plain_s)
        share = self._share(step, fused_s)
        yield GpuRow(
            metric=name,
            unit="ms",
            ours=1e3 * fused_s,
            runs=times["fused"].runs,
            peer=1e3 * peer_s,
            peer_name=peer_name,
            ratio=peer_s / fused_s,
            also={
                **share,
                "x plain": plain_s / fused_s,
                "tokens/s": step.num_tokens / fused_s,
                "plain ms": 1e3 * plain_s,
                **times["fused"].spread(),
                **{f"plain {figure}": value for figure, value in times["plain"].spread().items()},
            },
            in_table=name not in _LESSER,
        )
        yield self._host_row(step, batch, fused_s)
        for figure, value in share.items():
            if value > 1.0:
                yield GpuRow.said(name, f"faster than the data sheet: {figure} {value:.3g}", in_table=True)

    def compiled_row(self, step: Step) -> GpuRow:
        """The fused step beside the other one, both by the clock."""
        times = self._times(uniform_batch(step, self._runner))
        fused_s, compiled_s = times["fused"].median, times["plain"].median
        return GpuRow(
            metric=f"{step_name(step)}, compiled",
            unit="ms",
            ours=1e3 * fused_s,
            runs=times["fused"].runs,
            peer=1e3 * compiled_s,
            peer_name="torch.compile",
            ratio=compiled_s / fused_s,
            also={
                "compiled ms": 1e3 * compiled_s,
                **{f"compiled {figure}": value for figure, value in times["plain"].spread().items()},
                **times["fused"].spread(),
            },
            in_table=True,
        )

    def _times(self, batch: ForwardBatch) -> dict[str, Times]:
        """Of both passes."""
        passes = {"fused": self._fused, "plain": self.plain}
        calls = {name: partial(self._run, each, batch) for name, each in passes.items()}
        times = wall_times(calls, self._device)
        self._runner.model.forward_pass = self._fused
        return times

    def _run(self, forward_pass: ForwardPass, batch: ForwardBatch) -> None:
        self._runner.model.forward_pass = forward_pass
        self._runner.run(batch)

    def _anchor(self, step: Step) -> tuple[str, float] | None:
        """What others reach there, and seconds."""
        if "H200" not in self._measured.name:
            return None
        name, sheet = step_name(step), data_sheet(self._measured.name)
        if name in _TABLES_MS:
            return TABLES, _TABLES_MS[name] / 1e3
        if name not in _SHARES or sheet is None:
            return None
        num_bytes = decode_bytes(self._runner.model.config, step, self._runner.model.dtype.itemsize)
        return f"{_SHARES[name]:.0%} of bandwidth", num_bytes / (_SHARES[name] * sheet.bandwidth)

    @torch.inference_mode()
    def _host_row(self, step: Step, batch: ForwardBatch, fused_s: float) -> GpuRow:
        """Of the layers: the host's share and the device's. The step by the clock has sampling besides."""
        runner = self._runner
        inputs = runner.model.prepare(batch, runner.cache.shape.block_size)

        def layers() -> torch.Tensor:
            return runner.model.logits(runner.model.forward(inputs, runner.cache))

        device = call_times([layers], self._device)
        launch_s = launch_seconds(layers, self._device)
        device_s = device.median
        return GpuRow(
            metric=f"{step_name(step)}, host beyond device",
            unit="ms",
            ours=1e3 * (fused_s - device_s),
            runs=device.runs,
            also={
                **{f"graph {name}": value for name, value in self._share(step, device_s).items()},
                "graph ms": 1e3 * device_s,
                "launch ms": 1e3 * launch_s,
            },
            in_table=step_name(step) in _TABLE_HOST,
        )

    def _share(self, step: Step, seconds: float) -> Mapping[str, float]:
        """Of the data sheet's figures, which are those that others give; else of what was measured."""
        config, gpu = self._runner.model.config, data_sheet(device_name(self._device)) or self._measured
        if step.new_tokens > 1:
            return {"MFU": prefill_flops(config, step) / seconds / gpu.flops}
        num_bytes = decode_bytes(config, step, self._runner.model.dtype.itemsize)
        return {"bandwidth": num_bytes / seconds / gpu.bandwidth}


def _most_tokens(steps: list[Step], size: ModelSize) -> int:
    """Of whole blocks."""
    return max(step.block_tables(size.block_size).size * size.block_size for step in steps)


def _fitting(steps: tuple[Step, ...], size: ModelSize, device: torch.device) -> list[Step]:
    """Steps whose contexts have room beside the weights."""
    if device.type == "cpu":
        return list(steps)
    config, itemsize = size.config, size.dtype.itemsize
    room = (available_bytes(device) or 0) - weight_bytes(config, itemsize) - _SPARE_BYTES
    return [step for step in steps if kv_bytes(config, step, itemsize) <= room]
