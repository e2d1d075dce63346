"""The first section of `benchmarks.gpu`: what the machine is, and how fast a copy and a product are there.

Later sections take these two as the ceilings.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence

import torch

from benchmarks.on_gpu import bare
from benchmarks.on_gpu.section import DEVICE, Budget, GpuRow
from benchmarks.on_gpu.timer import clock_mhz, data_sheet, device_name, measured_gpu, warm_up
from engine.kernels.cost import Gpu
from engine.kernels.environment import Environment

COPY, PRODUCT = "copy, read and written", "bf16 matrix product"


def facts(device: torch.device, _budget: Budget, _rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    """Names and versions, and the two ceilings beside the vendor's figures."""
    environment = Environment.of(device)
    yield GpuRow.said(DEVICE, device_name(device), in_table=True)
    yield GpuRow.said("driver", environment.driver)
    yield GpuRow.said("torch", environment.torch_version)
    yield GpuRow.said("triton", environment.triton_version)
    yield GpuRow.said("python", platform.python_version())
    yield GpuRow.said("digests of frames", bare.digest_name())
    yield _figure("CPU cores", float(os.cpu_count() or 0), "")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield _figure("multiprocessors", float(properties.multi_processor_count), "")
        yield _figure("memory", properties.total_memory / 1e9, "GB")
        yield _figure("L2 cache", properties.L2_cache_size / 1e6, "MB")
    yield from _ceilings(device)


def ceilings(rows: Sequence[GpuRow], device: torch.device) -> Gpu:
    """As the rows have them; measured now if they do not. The device should be warm."""
    found = {row.metric: row.ours for row in rows}
    bandwidth, flops = found.get(COPY), found.get(PRODUCT)
    if bandwidth is None or flops is None:
        return measured_gpu(device)
    return Gpu(name=device_name(device), bandwidth=1e9 * bandwidth, flops=1e12 * flops)


def _ceilings(device: torch.device) -> Iterator[GpuRow]:
    warm_up(device)
    measured, sheet = measured_gpu(device), data_sheet(device_name(device))
    if (clock := clock_mhz(device)) is not None:
        yield _figure("SM clock under load", clock, "MHz")
    pairs = (
        (
            COPY,
            "GB/s",
            measured.bandwidth / 1e9,
            sheet.bandwidth / 1e9 if sheet else None,
        ),
        (PRODUCT, "TFLOP/s", measured.flops / 1e12, sheet.flops / 1e12 if sheet else None),
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


def _figure(metric: str, value: float, unit: str) -> GpuRow:
    return GpuRow(metric=metric, unit=unit, ours=value, runs=1)
