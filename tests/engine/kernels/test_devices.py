"""Occupancy and limits against figures counted by hand from the vendors' tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.kernels.devices import DEVICES
from engine.kernels.resources import Resources

SM_80, SM_90, SM_100, GFX942 = DEVICES
SMALL = Resources(registers=32, spill_bytes=0, shared_bytes=0, tensor_columns=0, instruction="", num_warps=4)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_a_small_program_fills_the_processor(device) -> None:
    assert device.occupancy(SMALL) == 1.0
    assert device.faults(SMALL) == []


@pytest.mark.parametrize(
    ("device", "change", "warps"),
    [
        # 72 registers x 32 threads: 7 warps in each quarter of 16,384; 7 programs of 4 warps.
        (SM_80, {"registers": 72}, 28),
        # 255 registers: two warps in a quarter; one program of 8.
        (SM_90, {"registers": 255, "num_warps": 8}, 8),
        # 82 KiB and the 1 KiB that each costs: two programs in 228 KiB, one in 164.
        (SM_90, {"shared_bytes": 82 * 1024}, 8),
        (SM_80, {"shared_bytes": 82 * 1024}, 4),
        # Single warps: 32 programs at most.
        (SM_80, {"num_warps": 1}, 32),
        # 256 of 512 columns: two programs.
        (SM_100, {"tensor_columns": 256}, 8),
        # 512 registers of a lane: 260 leave room for one, 128 for four warps in each of four parts.
        (GFX942, {"registers": 260}, 4),
        (GFX942, {"registers": 128}, 16),
        (GFX942, {"shared_bytes": 33 * 1024}, 4),
        # More than fits: none.
        (GFX942, {"shared_bytes": 65 * 1024}, 0),
    ],
)
def test_the_scarcest_resource_limits_the_warps(device, change: dict[str, int], warps: int) -> None:
    total = 32 if device is GFX942 else 64

    assert device.occupancy(replace(SMALL, **change)) == warps / total


@pytest.mark.parametrize(
    ("change", "faulty"),
    [
        ({"shared_bytes": 64 * 1024}, set()),
        ({"shared_bytes": 65 * 1024}, {"gfx942"}),
        ({"shared_bytes": 163 * 1024 + 1}, {"sm_80", "gfx942"}),
        ({"shared_bytes": 227 * 1024 + 1}, {"sm_80", "sm_90", "sm_100", "gfx942"}),
        ({"spill_bytes": 8}, {"sm_80", "sm_90", "sm_100", "gfx942"}),
        ({"tensor_columns": 513}, {"sm_80", "sm_90", "sm_100", "gfx942"}),
    ],
)
def test_spills_and_too_much_memory_are_faults(change: dict[str, int], faulty: set[str]) -> None:
    assert {device.name for device in DEVICES if device.faults(replace(SMALL, **change))} == faulty
