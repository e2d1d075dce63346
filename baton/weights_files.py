"""Which files hold a model's weights, and whether they are whole.

Reads safetensors headers only, never tensors: the check costs milliseconds for any size.
Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from baton.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The limit of the safetensors library itself; a larger length is damage, not a header.
_MAX_HEADER_BYTES = 100_000_000
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_weights_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, by name; each is checked to be whole.

    Those the index names, or the single file; others in the folder are ignored. Raises
    ModelError naming the file that is missing or damaged.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        names = _names_in(index)
    elif (folder / SINGLE_NAME).is_file():
        names = [SINGLE_NAME]
    else:
        raise ModelError(_no_weights(folder))
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which {INDEX_NAME} names; pull the model again")
        check_whole(folder / name)
    return tuple(folder / name for name in names)


def check_whole(path: Path) -> None:
    """Raises ModelError unless the file is exactly as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_bytes <= min(size, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a whole safetensors file ({size} bytes); pull the model again")
        expected = 8 + header_bytes + _data_bytes(path, file.read(header_bytes))
    if size != expected:
        raise ModelError(
            f"{path} has {size} bytes where its header asks for {expected}: an interrupted copy or "
            "download. Pull the model again"
        )


def _data_bytes(path: Path, header: bytes) -> int:
    try:
        tensors: dict[str, Any] = json.loads(header)
        ends = [int(tensors[name]["data_offsets"][1]) for name in tensors if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ModelError(f"{path} has a damaged safetensors header; pull the model again") from error
    return max(ends, default=0)


def _names_in(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} has no readable weight_map; pull the model again") from error
    for name in names:
        # A name with a folder in it could point outside the model.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}, which is not a safetensors file of this folder")
    if not names:
        raise ModelError(f"{index} names no files; pull the model again")
    return names


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} has its weights only as {pickled[0]}; Baton reads safetensors alone, because "
            "pickled files can run code. Convert them, or pull a repository that has safetensors"
        )
    return f"{folder} lacks {SINGLE_NAME} (or {INDEX_NAME}); run: baton pull <name>"
