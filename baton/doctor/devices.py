"""Accelerators, as torch sees them. torch is asked in a process of its own: it is large, and may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from baton.doctor.check import Check, ok, problem, warning

_NAME = "devices"
_PATIENCE_S = 120
# What the drivers of NVIDIA and AMD put there.
_DRIVER_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# The oldest that the kernels are compiled for.
_CAPABILITY = (8, 0)
_PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found["devices"].append({
            "name": torch.cuda.get_device_name(index),
            "capability": torch.cuda.get_device_capability(index),
            "free_bytes": free,
            "total_bytes": total,
        })
print(json.dumps(found))
"""


def probe() -> dict[str, Any]:
    """What torch says; {"error": ...} if it cannot say anything."""
    if find_spec("torch") is None:
        return {}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        last = ran.stderr.strip().splitlines()[-1:] if "ran" in locals() else [str(error)]
        return {"error": "".join(last) or "it ended without a word"}
    return found


def checks(
    asked: Callable[[], dict[str, Any]] = probe, nodes: tuple[Path, ...] = _DRIVER_NODES
) -> Iterator[Check]:
    """CPU alone is fine; an accelerator that torch cannot use is not."""
    found = asked()
    if not found:
        yield ok(_NAME, "torch is not installed: this machine can ask and route, not compute")
        return
    if "error" in found:
        yield problem(_NAME, f"torch cannot be used: {found['error']}", "install torch again")
        return
    if not found["devices"]:
        yield _without(found, [str(node) for node in nodes if node.exists()])
    for index, device in enumerate(found["devices"]):
        yield _device(index, device)


def _without(found: dict[str, Any], drivers: list[str]) -> Check:
    if not drivers:
        return ok(_NAME, "the CPU; no driver of an accelerator is there")
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPU"
    return problem(
        _NAME,
        f"{drivers[0]} is there, but torch {found['torch']} ({build}) finds no device",
        "install the build of torch that fits the driver; look at CUDA_VISIBLE_DEVICES and at the rights of "
        f"{drivers[0]}",
    )


def _device(index: int, device: dict[str, Any]) -> Check:
    name = f"cuda:{index}"
    gib = f"{device['free_bytes'] / (1 << 30):.1f} GiB free of {device['total_bytes'] / (1 << 30):.1f} GiB"
    found = f"{device['name']}, {gib}"
    capability = tuple(device["capability"])
    if capability < _CAPABILITY:
        return warning(
            name,
            f"{found}, compute capability {capability[0]}.{capability[1]}",
            "kernels are made for 8.0 and newer; use another device, or the CPU",
        )
    if device["free_bytes"] < device["total_bytes"] / 2:
        return warning(name, found, "somebody else uses it; nvidia-smi or rocm-smi says who")
    return ok(name, found)
