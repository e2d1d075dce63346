"""What measurements of kernels hold for: one kind of device, its software, and these kernels."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import triton

# Of the device's driver in the kernel of the system, whichever is loaded.
_DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """device: its model.  driver: its version, or that of the system where it has none.

    sources: digest of the kernels' source files.
    """

    device: str
    driver: str
    torch_version: str
    triton_version: str
    sources: str

    @classmethod
    def of(cls, device: torch.device) -> Environment:
        """Of a device in this process."""
        is_gpu = device.type == "cuda"
        versions = [path.read_text(encoding="utf-8").strip() for path in _DRIVERS if path.is_file()]
        return cls(
            device=torch.cuda.get_device_name(device) if is_gpu else f"{device.type} {platform.machine()}",
            driver=next(iter(versions), platform.release()) if is_gpu else platform.release(),
            torch_version=str(torch.__version__),
            triton_version=str(triton.__version__),
            sources=sources_digest(Path(__file__).parent),
        )

    @property
    def file_name(self) -> str:
        """Differs where anything does."""
        names = "-".join(re.sub(r"[^a-z0-9.+]+", "_", part.lower()) for part in asdict(self).values())
        return f"{names}.json"


def sources_digest(folder: Path) -> str:
    """Of the names and the contents of its Python files."""
    digest = blake2b(digest_size=8)
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
