"""The document's tables: what stands in a cell, and that the costs in docs/kernels.md are today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.kernels.devices import DEVICES
from engine.kernels.report import cost_table, replaced, resource_table
from engine.kernels.resources import Resources

DOCUMENT = Path(__file__).parents[3] / "docs" / "kernels.md"


def resources(registers: int, instruction: str = "", shared_bytes: int = 1536) -> Resources:
    return Resources(
        registers=registers,
        spill_bytes=0,
        shared_bytes=shared_bytes,
        tensor_columns=0,
        instruction=instruction,
        num_warps=4,
    )


def test_a_row_holds_the_worst_of_a_kernels_calls_on_each_device() -> None:
    sm_80, sm_90 = DEVICES[:2]
    lines = [
        ("norm", "BLOCK=64 warps=4", sm_80, resources(72)),
        ("norm", "BLOCK=64 warps=4", sm_90, resources(32, "wgmma")),
        ("norm", "BLOCK=64 warps=4", sm_80, resources(72, shared_bytes=0)),
        ("norm", "BLOCK=64 warps=4", sm_80, resources(40, shared_bytes=4096)),
        ("norm", "BLOCK=128 warps=4", sm_80, resources(255, shared_bytes=0)),
        ("norm", "BLOCK=128 warps=4", sm_80, resources(255)),
    ]

    rows = resource_table(lines).splitlines()[2:]

    assert rows == [
        "| norm | BLOCK=64 warps=4 | 72 r 1.5 KiB 44% | 32 r 1.5 KiB 100% wgmma | - | - |",
        "| norm | BLOCK=128 warps=4 | 255 r 1.5 KiB 12% | - | - | - |",
    ]


def test_only_what_lies_between_the_markers_is_replaced() -> None:
    document = "before\n<!-- costs -->\nold\n<!-- end of costs -->\nafter\n"

    assert replaced(document, "costs", "new\n") == (
        "before\n<!-- costs -->\nnew\n<!-- end of costs -->\nafter\n"
    )
    with pytest.raises(ValueError, match="markers"):
        replaced("no markers", "costs", "new\n")


def test_the_documents_costs_are_todays() -> None:
    document = DOCUMENT.read_text("utf-8")

    assert replaced(document, "costs", cost_table()) == document, (
        "run `python -m engine.kernels.audit --write docs/kernels.md`"
    )
