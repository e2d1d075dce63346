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
    ModelError naming the file that is missing or damaged, or lacks a tensor that it should have.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed(folder, _weight_map(index))
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ModelError(_no_weights(folder))
    whole_tensor_names(single)
    return (single,)


def whole_tensor_names(path: Path) -> frozenset[str]:
    """The tensors of a file; raises ModelError unless it is exactly as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_bytes <= min(size, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a whole safetensors file ({size} bytes); pull the model again")
        ends = _tensor_ends(path, file.read(header_bytes))
    expected = 8 + header_bytes + max(ends.values(), default=0)
    if size != expected:
        raise ModelError(
            f"{path} has {size} bytes where its header asks for {expected}: an interrupted copy or "
            "download. Pull the model again"
        )
    return frozenset(ends)


def _tensor_ends(path: Path, header: bytes) -> dict[str, int]:
    """Where each tensor ends, in bytes from the end of the header."""
    try:
        tensors: dict[str, Any] = json.loads(header)
        return {name: int(tensors[name]["data_offsets"][1]) for name in tensors if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ModelError(f"{path} has a damaged safetensors header; pull the model again") from error


def _indexed(folder: Path, weight_map: dict[str, str]) -> tuple[Path, ...]:
    """The files that a weight_map names, once each of its tensors is known to be where it says."""
    found: dict[str, frozenset[str]] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which {INDEX_NAME} names; pull the model again")
        found[name] = whole_tensor_names(folder / name)
    for tensor, name in sorted(weight_map.items()):
        if tensor not in found[name]:
            raise ModelError(f"{folder / name} lacks the tensor {tensor}, {_elsewhere(tensor, found)}")
    return tuple(folder / name for name in found)


def _elsewhere(tensor: str, found: dict[str, frozenset[str]]) -> str:
    other = next((name for name, tensors in found.items() if tensor in tensors), None)
    place = "" if other is None else f", but {other} has it"
    return f"which {INDEX_NAME} says is there{place}; the files are not of one model, pull it again"


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor; raises ModelError unless all files are safetensors of this folder."""
    try:
        weight_map: dict[str, Any] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{index} has no readable weight_map; pull the model again") from error
    for name in weight_map.values():
        # A name with a folder in it could point outside the model.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}, which is not a safetensors file of this folder")
    if not weight_map:
        raise ModelError(f"{index} names no files; pull the model again")
    return weight_map


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} has its weights only as {pickled[0]}; Baton reads safetensors alone, because "
            "pickled files can run code. Convert them, or pull a repository that has safetensors"
        )
    return f"{folder} lacks {SINGLE_NAME} (or {INDEX_NAME}); run: baton pull <name>"
