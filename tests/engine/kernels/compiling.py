"""What tests of the audit run in a process of its own, where Triton is not interpreted.

    python -m tests.engine.kernels.compiling flaws       what the audit says of kernels that are flawed
    python -m tests.engine.kernels.compiling dispatcher  calls whose kernel is not the dispatcher's
    python -m tests.engine.kernels.compiling storing     what stores KV, to a cache of either 16-bit type

Prints JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.kernels.add_rms_norm import add_rms_norm_launch
from engine.kernels.audit import Selection, entries, faults
from engine.kernels.cases import LLAMA, Storage, launches
from engine.kernels.devices import DEVICES
from engine.kernels.kernel import Config, Kernel, Launch
from engine.kernels.resources import Resources


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, BLOCK_M: tl.constexpr):
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision="ieee")
    tl.store(out_ptr + at, product)


def product_launch(size: int, dtype: torch.dtype) -> Launch:
    """The product of two square matrices, which the audit is to take for attention's."""
    matrix = torch.empty(size, size, dtype=dtype, device="meta")
    return Launch(
        kernel=Kernel(
            name="prefill_attention", function=_product, configs=(Config(constants={}, num_warps=4),)
        ),
        grid=lambda _: (1,),
        arguments={"a_ptr": matrix, "b_ptr": matrix, "out_ptr": matrix.float()},
        constants={"BLOCK_M": size},
        shape=(),
    )


def wide_norm_launch() -> Launch:
    """A row of 8,192 elements, of which 32 threads would have to hold 256 each in registers."""
    row = torch.empty(1, 8192, dtype=torch.float32, device="meta")
    return add_rms_norm_launch(row, row, row[0], 1e-5, row)


# What the audit is to find: the call, its warps, and the devices.
FLAWS = {
    "spills": (wide_norm_launch(), 1, ("sm_90",)),
    "no tensor core": (product_launch(32, torch.float32), 4, ("sm_80",)),
    # wgmma and tcgen05 need four warps.
    "narrow": (product_launch(64, torch.bfloat16), 1, ("sm_80", "sm_90", "sm_100")),
    "none": (product_launch(64, torch.bfloat16), 4, ("sm_80", "sm_90", "sm_100", "gfx942")),
}


def flaws() -> dict[str, dict[str, list[str]]]:
    """By flaw and device: the audit's words."""
    (model,) = entries(Selection(models=(LLAMA.name,), devices=("sm_90",), block_sizes=(16,)))[:1]
    found: dict[str, dict[str, list[str]]] = {}
    for flaw, (launch, num_warps, devices) in FLAWS.items():
        case = dataclasses.replace(model.case, launch=launch)
        config = Config(constants={}, num_warps=num_warps)
        for device in DEVICES:
            if device.name in devices:
                entry = dataclasses.replace(model, case=case, config=config, device=device)
                resources = Resources.of(launch.compile(device.target, config))
                found.setdefault(flaw, {})[device.name] = faults(entry, resources)
    return found


def storing() -> dict[str, list[str]]:
    """By targets and their types: what is wrong with rope_store_kv where it is compiled for them."""
    (device,) = (device for device in DEVICES if device.name == "sm_90")
    found = {}
    for kv_dtype in (torch.bfloat16, torch.float16):
        for launch in launches(LLAMA, 16, Storage(kv_dtype=kv_dtype)):
            targets = {name: kind for name, kind in launch.shape if name in ("cache", "rows", "stage")}
            if launch.kernel.name == "rope_store_kv" and str(targets) not in found:
                compiled = launch.compile(device.target, launch.kernel.configs_for(launch.shape)[0])
                found[str(targets)] = device.faults(Resources.of(compiled))
    return found


class AbsentDriver:
    """A driver without a device, which is all that a dispatcher needs that does not launch."""

    def __init__(self, target: GPUTarget, index: int) -> None:
        self._target, self._index = target, index

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._index

    def get_current_stream(self, _device: int) -> int:
        return 0


def dispatcher() -> dict[str, Any]:
    """How many calls Triton's dispatcher was given, and those for which it would compile another kernel."""
    taken: list[dict[str, Any]] = []

    def take(**call: Any) -> bool:
        taken.append(call["compile"])
        return True

    knobs.runtime.jit_cache_hook = take
    differing, num_calls = [], 0
    for index, device in enumerate(DEVICES):
        driver.set_active(AbsentDriver(device.target, index))
        selection = Selection(devices=(device.name,), block_sizes=(16,), is_brief=True)
        for entry in entries(selection):
            taken.clear()
            entry.case.launch.run(entry.config)
            source, options = entry.case.launch.source(device.target, entry.config)
            (seen,) = taken
            num_calls += 1
            seen_options = {name: seen[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
            if (
                seen["signature"] != source.signature
                or seen["constants"] != source.constants
                or seen["configs"] != [source.attrs]
                or seen_options.items() - options.items()
            ):
                differing.append(str(entry))
    return {"num_calls": num_calls, "differing": differing}


if __name__ == "__main__":
    json.dump({"flaws": flaws, "dispatcher": dispatcher, "storing": storing}[sys.argv[1]](), sys.stdout)
