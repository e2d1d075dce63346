"""The sections of `benchmarks.gpu` that run whole steps of a Llama-3.1-8B-shaped model with random weights.

A step is measured three ways: by the clock from its batch to its sampled tokens; by what the host takes to
launch it; and as a recorded graph, which takes the host out: what a device would do if nothing held it up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from benchmarks.on_gpu.agreement import agreement
from benchmarks.on_gpu.batches import uniform_batch
from benchmarks.on_gpu.formulas import decode_bytes, prefill_flops
from benchmarks.on_gpu.kernels import tuned
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.shapes import model_size, model_steps, step_name
from benchmarks.on_gpu.timer import (
    call_seconds,
    data_sheet,
    device_name,
    launch_seconds,
    measured_gpu,
    wall_seconds,
)
from benchmarks.on_gpu.transfer_model import ModelSize, make_runner
from engine.batch import ForwardBatch
from engine.kernels.choices import Choices
from engine.kernels.cost import Gpu
from engine.kernels.model_launches import Step
from engine.kv_cache import available_bytes
from engine.model.forward_pass import ForwardPass
from engine.model.fused_pass import FusedPass
from engine.model.plain_pass import PlainPass
from engine.runner import ModelRunner

LAYERS_COMPILED = "layers compiled by torch"
OPERATOR_TABLES = "operator tables"
# Milliseconds on an H200, added up from measured tables of operators in bfloat16; what a step of 128 x 4096
# reads, at 83 % of the data sheet's bandwidth.
_ANCHORS = {
    "prefill 256": 7.3,
    "prefill 1024": 21.4,
    "prefill 2048": 41.9,
    "decode 1 x 1024": 5.2,
    "decode 128 x 1024": 10.1,
    "decode 128 x 4096": 21.3,
}
# Steps of which the short table says where the time goes.
_TABLE_HOST = ("decode 1 x 1024", "decode 32 x 1024")
# Beside the weights and the cache: what a step needs.
_SPARE_BYTES = 8 << 30
_PLAIN_S = 3.0


def model(device: torch.device, budget: Budget) -> Iterator[GpuRow]:
    """Whether both passes agree; then each step."""
    size, choices = model_size(device), tuned(device)
    yield from agreement(size, choices, device)
    torch.cuda.empty_cache()
    steps = _fitting(model_steps(device), size, device)
    bench = Bench(make_runner(size, _most_tokens(steps, size), device), device, choices)
    for step in model_steps(device):
        if step not in steps:
            yield GpuRow.not_run(step_name(step), "no room in the device's memory")
        elif not budget.has(_PLAIN_S):
            yield GpuRow.not_run(step_name(step))
        else:
            yield from _rows(bench, step)


def compiled(device: torch.device, budget: Budget) -> Iterator[GpuRow]:
    """The layers as torch.compile's programs, at some steps."""
    if device.type == "cpu":
        yield GpuRow.not_run(LAYERS_COMPILED, "a CPU")
        return
    size = model_size(device)
    steps = [step for step in model_steps(device) if step.num_tokens in (1, 32, 256, 2048)]
    runner = make_runner(size, _most_tokens(steps, size), device)
    began = time.perf_counter()
    compilation = runner.compile()
    if compilation is None:
        yield GpuRow.failed(LAYERS_COMPILED, "they stay eager; the log says why")
        return
    yield GpuRow(
        metric=LAYERS_COMPILED,
        unit="s",
        ours=time.perf_counter() - began,
        runs=compilation.num_programs,
    )
    for step in steps:
        if not budget.has(_PLAIN_S):
            yield GpuRow.not_run(f"compiled, {step_name(step)}")
            continue
        batch = uniform_batch(step, runner)
        seconds = wall_seconds(lambda batch=batch: runner.run(batch), device)  # type: ignore[misc]
        yield GpuRow(metric=f"compiled, {step_name(step)}", unit="ms", ours=1e3 * seconds, runs=1)


def _rows(bench: Bench, step: Step) -> Iterator[GpuRow]:
    """What goes wrong with one step, such as a lack of memory, costs none of the others."""
    try:
        yield from bench.rows(step)
    except RuntimeError as error:
        yield GpuRow.failed(step_name(step), error)


class Bench:
    """One model with both passes."""

    def __init__(self, runner: ModelRunner, device: torch.device, choices: Choices) -> None:
        config = runner.model.config
        self._runner = runner
        self._device = device
        self._fused, self._plain = FusedPass(config, choices), PlainPass(config)
        self._measured = measured_gpu(device)
        # Zeros would be faster.
        runner.cache.data.normal_()

    def rows(self, step: Step) -> Iterator[GpuRow]:
        """A step by the clock, and where its time goes."""
        batch = uniform_batch(step, self._runner)
        plain_s = self._wall(batch, self._plain)
        fused_s = self._wall(batch, self._fused)
        name = step_name(step)
        anchor_ms = _ANCHORS.get(name) if "H200" in self._measured.name else None
        peer_s = plain_s if anchor_ms is None else anchor_ms / 1e3
        yield GpuRow(
            metric=name,
            unit="ms",
            ours=1e3 * fused_s,
            runs=1,
            peer=1e3 * peer_s,
            peer_name="plain" if anchor_ms is None else OPERATOR_TABLES,
            ratio=peer_s / fused_s,
            also={
                "tokens/s": step.num_tokens / fused_s,
                **self._share(step, fused_s),
                "plain ms": 1e3 * plain_s,
                "x plain": plain_s / fused_s,
            },
            in_table=True,
        )
        yield self._host_row(step, batch, fused_s)

    def _wall(self, batch: ForwardBatch, forward_pass: ForwardPass) -> float:
        self._runner.model.forward_pass = forward_pass
        self._runner.run(batch)
        return wall_seconds(lambda: self._runner.run(batch), self._device)

    @torch.inference_mode()
    def _host_row(self, step: Step, batch: ForwardBatch, fused_s: float) -> GpuRow:
        """Of the layers: the host's share and the device's. The step by the clock has sampling besides."""
        runner = self._runner
        inputs = runner.model.prepare(batch, runner.cache.shape.block_size)

        def layers() -> torch.Tensor:
            return runner.model.logits(runner.model.forward(inputs, runner.cache))

        layers()
        launch_s = launch_seconds(layers, self._device)
        device_s = call_seconds([layers], self._device)
        return GpuRow(
            metric=f"{step_name(step)}, host beyond device",
            unit="ms",
            ours=1e3 * (fused_s - device_s),
            runs=1,
            also={
                "launch ms": 1e3 * launch_s,
                "graph ms": 1e3 * device_s,
                **{f"graph {name}": value for name, value in self._share(step, device_s).items()},
            },
            in_table=step_name(step) in _TABLE_HOST,
        )

    def _share(self, step: Step, seconds: float) -> Mapping[str, float]:
        """Of the data sheet's figures, which are those that others give; else of what was measured."""
        config, gpu = self._runner.model.config, data_sheet(device_name(self._device)) or self._measured
        assert isinstance(gpu, Gpu)
        if step.new_tokens > 1:
            return {"MFU": prefill_flops(config, step) / seconds / gpu.flops}
        num_bytes = decode_bytes(config, step, self._runner.model.dtype.itemsize)
        return {"share of bandwidth": num_bytes / seconds / gpu.bandwidth}


def _most_tokens(steps: list[Step], size: ModelSize) -> int:
    """Of whole blocks."""
    return max(step.block_tables(size.block_size).size * size.block_size for step in steps)


def _fitting(steps: tuple[Step, ...], size: ModelSize, device: torch.device) -> list[Step]:
    """Steps whose contexts have room beside the weights."""
    if device.type == "cpu":
        return list(steps)
    config, itemsize = size.config, size.dtype.itemsize
    nothing = Step(num_sequences=0, new_tokens=1, context=0)
    weights = decode_bytes(config, nothing, itemsize)
    room = (available_bytes(device) or 0) - weights - _SPARE_BYTES
    return [step for step in steps if decode_bytes(config, step, itemsize) - weights <= room]
