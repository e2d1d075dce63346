"""What a compiled kernel holds and uses: registers, spills, shared memory, the matrix instruction.

Read from what the compiler leaves: for NVIDIA the machine code (by cuobjdump, which Triton brings along) and
the PTX, for AMD the assembly text. Knows no device's limits; those are engine/kernels/devices.py's.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

from triton import knobs
from triton.compiler import CompiledKernel

# The widest first: a kernel that has one may have a narrower one beside it.
_PTX_INSTRUCTIONS = (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma_async"), ("mma", "mma.sync"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one program holds while it runs.

    registers: 32-bit ones per thread.  spill_bytes: of memory per thread that stands in for registers.
    shared_bytes: per program.  tensor_columns: of sm_100's tensor memory, per program.
    instruction: what multiplies matrices, the widest one found: tcgen05, wgmma, mma or mfma; "" for none.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    instruction: str
    num_warps: int

    @classmethod
    def of(cls, compiled: CompiledKernel) -> Resources:
        """Reads a kernel compiled for any target."""
        metadata = compiled.metadata
        read = _nvidia if "cubin" in compiled.asm else _amd
        registers, spill_bytes, instruction = read(compiled)
        return cls(
            registers=registers,
            spill_bytes=spill_bytes,
            shared_bytes=metadata.shared,
            tensor_columns=getattr(metadata, "tmem_size", None) or 0,
            instruction=instruction,
            num_warps=metadata.num_warps,
        )


def _nvidia(compiled: CompiledKernel) -> tuple[int, int, str]:
    """cuobjdump says `REG:72 STACK:0 SHARED:1024 LOCAL:0`. Without arrays, a stack is for spills only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = compiled.asm["ptx"]
    instruction = next((name for name, opcode in _PTX_INSTRUCTIONS if opcode in ptx), "")
    return counts["REG"], counts["STACK"] + counts["LOCAL"], instruction


def _amd(compiled: CompiledKernel) -> tuple[int, int, str]:
    """The metadata at the assembly's end: `.vgpr_count: 44`, accumulation registers among them.

    Scalar registers that spill go into lanes of a vector register, or to scratch memory, which is counted.
    """
    assembly = compiled.asm["amdgcn"]

    def count(name: str) -> int:
        found = re.search(rf"^\s+\.{name}:\s+(\d+)$", assembly, re.MULTILINE)
        if found is None:
            raise ValueError(f"the assembly does not say {name}")
        return int(found[1])

    spill_bytes = max(count("private_segment_fixed_size"), 4 * count("vgpr_spill_count"))
    return count("vgpr_count"), spill_bytes, "mfma" if "v_mfma" in assembly else ""
