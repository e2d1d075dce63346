"""Shards and their index, written by hand from the format's description."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.weights_files import find_weights_files

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-{number}-of-3.safetensors" for number in (1, 2, 3))
SHARDS = {FIRST: ["embed", "a"], SECOND: ["b", "c"], THIRD: ["d"]}


def write_shard(path: Path, tensors: Sequence[str]) -> None:
    """Each tensor: 1,000 bytes."""
    header = {
        name: {"dtype": "U8", "shape": [1000], "data_offsets": [1000 * i, 1000 * (i + 1)]}
        for i, name in enumerate(tensors)
    }
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(1000 * len(tensors)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tensors in SHARDS.items():
        write_shard(tmp_path / name, tensors)
    weight_map = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 5000}, "weight_map": weight_map}))
    return tmp_path


def names_of(files: Sequence[Path]) -> list[str]:
    return [path.name for path in files]


def test_all_shards_in_order(folder: Path) -> None:
    assert names_of(find_weights_files(folder)) == [FIRST, SECOND, THIRD]


def test_the_second_shard_deleted(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(ModelError, match=f"lacks {re.escape(SECOND)}, which {re.escape(INDEX)} names"):
        find_weights_files(folder)


def test_the_third_shard_cut(folder: Path) -> None:
    path = folder / THIRD
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ModelError, match=rf"{re.escape(THIRD)} has \d+ bytes where its header asks for \d+"):
        find_weights_files(folder)


@pytest.mark.parametrize("extra", ["model-4-of-4.safetensors", "pytorch_model-1-of-1.bin"])
def test_a_file_that_the_index_does_not_name_is_ignored(folder: Path, extra: str) -> None:
    (folder / extra).write_bytes(b"no weights file at all")
    assert names_of(find_weights_files(folder)) == [FIRST, SECOND, THIRD]


def test_a_tensor_in_another_shard_than_the_index_says(folder: Path) -> None:
    write_shard(folder / SECOND, ["b"])
    write_shard(folder / THIRD, ["c", "d"])
    expected = f"{SECOND} lacks the tensor c, which {INDEX} says is there, but {THIRD} has it"
    with pytest.raises(ModelError, match=re.escape(expected)):
        find_weights_files(folder)


def test_a_tensor_that_no_shard_has(folder: Path) -> None:
    write_shard(folder / FIRST, ["embed"])
    with pytest.raises(ModelError, match=f"{re.escape(FIRST)} lacks the tensor a, .* says is there; "):
        find_weights_files(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": null}', '{"weight_map": {}}', '{"weight_map": ["a"]}']
)
def test_an_index_without_a_weight_map(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelError, match=f"{re.escape(INDEX)} (has no readable weight_map|names no files)"):
        find_weights_files(folder)
