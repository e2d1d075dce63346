from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.doctor import devices
from baton.doctor.check import Check

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "free_bytes": 139 << 30, "total_bytes": 140 << 30}
CUDA = {"torch": "2.13.0", "cuda": "13.0", "hip": None}


def found(answer: dict[str, Any], *nodes: Path) -> list[Check]:
    return list(devices.checks(lambda: answer, nodes))


def test_without_torch_a_machine_can_still_ask() -> None:
    (check,) = found({})
    assert (check.state, "torch is not installed" in check.found) == ("ok", True)


def test_a_torch_that_cannot_be_loaded_is_a_problem() -> None:
    (check,) = found({"error": "OSError: libcudart.so.13: cannot open shared object file"})
    assert check.state == "problem"
    assert "libcudart.so.13" in check.found


def test_no_device_and_no_driver_is_a_cpu(tmp_path) -> None:
    (check,) = found({**CUDA, "cuda": None, "devices": []}, tmp_path / "nvidiactl")
    assert check.state == "ok"


def test_a_driver_without_a_device_is_a_problem(tmp_path) -> None:
    (check,) = found({**CUDA, "cuda": None, "devices": []}, tmp_path)
    assert check.state == "problem"
    assert f"{tmp_path} is there, but torch 2.13.0 (CPU) finds no device" in check.found


@pytest.mark.parametrize(
    ("device", "state"),
    [
        (H200, "ok"),
        ({**H200, "capability": [8, 0]}, "ok"),
        ({**H200, "capability": [7, 5]}, "warning"),
        ({**H200, "free_bytes": 69 << 30}, "warning"),
    ],
    ids=["new", "oldest", "too-old", "in-use"],
)
def test_each_device_is_looked_at(device, state) -> None:
    first, second = found({**CUDA, "devices": [H200, device]})
    assert (first.name, first.state) == ("cuda:0", "ok")
    assert (second.name, second.state) == ("cuda:1", state)
    assert second.found.startswith("NVIDIA H200")


# What of torch the question uses; the real one takes seconds to load.
FAKE_TORCH = """
from types import SimpleNamespace
__version__ = "2.13.0"
version = SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    mem_get_info=lambda index: (139 << 30, 140 << 30),
    get_device_name=lambda index: "NVIDIA H200",
    get_device_capability=lambda index: (9, 0),
)
"""


def test_the_question_to_torch_has_an_answer(monkeypatch, tmp_path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert devices.probe() == {**CUDA, "devices": [H200]}


def test_a_question_without_an_answer_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(devices, "_PROBE", "import sys; sys.exit('no driver')")
    assert devices.probe() == {"error": "no driver"}
