"""The first section of `benchmarks.gpu`: what the machine is, and how fast a copy and a product are there."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch

from benchmarks.on_gpu import bare
from benchmarks.on_gpu.section import Budget, GpuRow
from benchmarks.on_gpu.timer import data_sheet, device_name, measured_gpu
from engine.kernels.environment import Environment

DEVICE = "device"


def facts(device: torch.device, _budget: Budget) -> Iterator[GpuRow]:
    """Names and versions, and the two ceilings beside the vendor's figures."""
    environment = Environment.of(device)
    yield _note(DEVICE, device_name(device))
    yield _note("driver", environment.driver)
    yield _note("torch", environment.torch_version)
    yield _note("triton", environment.triton_version)
    yield _note("python", platform.python_version())
    yield _note("digests of frames", bare.digest_name())
    yield _figure("CPU cores", float(os.cpu_count() or 0), "")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield _figure("multiprocessors", float(properties.multi_processor_count), "")
        yield _figure("memory", properties.total_memory / 1e9, "GB")
        yield _figure("L2 cache", properties.L2_cache_size / 1e6, "MB")
    yield from _ceilings(device)


def _ceilings(device: torch.device) -> Iterator[GpuRow]:
    measured, sheet = measured_gpu(device), data_sheet(device_name(device))
    pairs = (
        (
            "copy, read and written",
            "GB/s",
            measured.bandwidth / 1e9,
            sheet.bandwidth / 1e9 if sheet else None,
        ),
        ("bf16 matrix product", "TFLOP/s", measured.flops / 1e12, sheet.flops / 1e12 if sheet else None),
    )
    for metric, unit, ours, peer in pairs:
        yield GpuRow(
            metric=metric,
            unit=unit,
            ours=ours,
            runs=1,
            peer=peer,
            peer_name="data sheet" if peer else None,
            ratio=ours / peer if peer else None,
            in_table=True,
        )


def _note(metric: str, note: str) -> GpuRow:
    return GpuRow(metric=metric, unit="", ours=None, runs=0, note=note, in_table=metric == DEVICE)


def _figure(metric: str, value: float, unit: str) -> GpuRow:
    return GpuRow(metric=metric, unit=unit, ours=value, runs=1)
