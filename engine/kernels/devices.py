"""GPUs that kernels are compiled for without being there, and how many programs a processor holds at once.

A processor is NVIDIA's streaming multiprocessor or AMD's compute unit. Their sizes are those of the CUDA C++
Programming Guide, "Technical specifications per compute capability", and of AMD's CDNA3 instruction set
guide. Occupancy is an estimate from what a program holds; whether more of it helps is another question.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from engine.kernels.resources import Resources

KIB = 1024
# Of sm_100's tensor memory, per processor.
TENSOR_COLUMNS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One architecture.

    max_shared_bytes: most that a program may have.  shared_bytes: the processor's.
    reserved_shared_bytes: what each program costs beside its own.
    max_warps, max_programs: at once on a processor.
    instruction: the widest that multiplies matrices, as resources.py names it.
    """

    name: str
    target: GPUTarget
    max_shared_bytes: int
    shared_bytes: int
    reserved_shared_bytes: int
    max_warps: int
    max_programs: int
    instruction: str

    def faults(self, resources: Resources) -> list[str]:
        """Why a program cannot run here, or should not."""
        faults = []
        if resources.shared_bytes > self.max_shared_bytes:
            faults.append(f"{resources.shared_bytes} bytes shared of {self.max_shared_bytes}")
        if resources.tensor_columns > TENSOR_COLUMNS:
            faults.append(f"{resources.tensor_columns} tensor columns of {TENSOR_COLUMNS}")
        if resources.spill_bytes:
            faults.append(f"spills {resources.spill_bytes} bytes")
        return faults

    def occupancy(self, resources: Resources) -> float:
        """Share of the processor's warps that can be there at once.

        Programs at once = min(by warps, registers, shared and tensor memory, the device's limit).
        """
        shared = resources.shared_bytes + self.reserved_shared_bytes
        programs = min(
            self.max_programs,
            self.max_warps // resources.num_warps,
            self._warps_by_registers(resources.registers) // resources.num_warps,
            self.shared_bytes // shared if shared else self.max_programs,
            TENSOR_COLUMNS // resources.tensor_columns if resources.tensor_columns else self.max_programs,
        )
        return programs * resources.num_warps / self.max_warps

    def _warps_by_registers(self, registers: int) -> int:
        if self.target.backend == "cuda":
            # 65,536 per processor in four equal parts, given to warps in pieces of 256.
            per_warp = _rounded_up(registers * 32, 256)
            return 4 * (16384 // per_warp)
        # 512 per lane in each of four parts, given in pieces of 8.
        return 4 * min(self.max_warps // 4, 512 // _rounded_up(registers, 8))


def _nvidia(arch: int, *, shared_kib: int, instruction: str) -> Device:
    return Device(
        name=f"sm_{arch}",
        target=GPUTarget("cuda", arch, 32),
        max_shared_bytes=(shared_kib - 1) * KIB,
        shared_bytes=shared_kib * KIB,
        reserved_shared_bytes=KIB,
        max_warps=64,
        max_programs=32,
        instruction=instruction,
    )


DEVICES = (
    _nvidia(80, shared_kib=164, instruction="mma"),
    _nvidia(90, shared_kib=228, instruction="wgmma"),
    _nvidia(100, shared_kib=228, instruction="tcgen05"),
    Device(
        name="gfx942",
        target=GPUTarget("hip", "gfx942", 64),
        max_shared_bytes=64 * KIB,
        shared_bytes=64 * KIB,
        reserved_shared_bytes=0,
        max_warps=32,
        max_programs=32,
        instruction="mfma",
    ),
)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
