"""Tensors come out of a checkpoint as they are stored, in memory of their own, or not at all."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ModelError
from engine.model.weights import EMBEDDING, Checkpoint

Write = Callable[..., Path]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes tensors, beside an embedding of 5 x 3, into a file."""

    def write(tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype = torch.float32) -> Path:
        path = tmp_path / "model.safetensors"
        save_file({EMBEDDING: random(5, 3, dtype=dtype), **tensors}, path)
        return path

    return write


def zero_data(path: Path) -> None:
    """Overwrites the tensors' bytes in place, as whoever copies another model over this one does."""
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        file.seek(8 + header_bytes)
        file.write(bytes(path.stat().st_size - 8 - header_bytes))


def test_a_tensor_keeps_its_values_when_the_file_changes(write: Write) -> None:
    a, b = random(40, 50), random(7, seed=2)
    path = write({"a": a, "b": b})
    checkpoint = Checkpoint([path])
    part = torch.empty(3, 7)
    taken = checkpoint.take("a", (40, 50))
    checkpoint.take_into(part[1], "b")
    zero_data(path)

    assert torch.equal(taken, a)
    assert torch.equal(part[1], b)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_stays_mapped_and_files_are_opened_again(write: Write) -> None:
    a, b = random(40, 50), random(7, seed=2)
    path = write({"a": a, "b": b})

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    checkpoint = Checkpoint([path])
    first = checkpoint.take("a", (40, 50))
    assert is_mapped()
    checkpoint.release()
    assert not is_mapped()
    second = checkpoint.take("b", (7,))
    checkpoint.release()
    assert not is_mapped()
    assert torch.equal(first, a)
    assert torch.equal(second, b)


def test_tensors_are_in_the_embeddings_dtype_unless_told_otherwise(write: Write) -> None:
    path = write({"a": random(6), "norm": random(6, seed=2)}, dtype=torch.bfloat16)
    checkpoint = Checkpoint([path])
    assert torch.equal(checkpoint.take("a", (6,)), random(6).bfloat16())
    assert torch.equal(checkpoint.take("norm", (6,), dtype=torch.float32), random(6, seed=2))
    assert Checkpoint([path], dtype=torch.float16).take("a", (6,)).dtype is torch.float16


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_dtype_is_converted_as_torch_does(write: Write, stored: torch.dtype, target: torch.dtype) -> None:
    a = random(9, 4, dtype=stored)
    checkpoint = Checkpoint([write({"a": a})], dtype=target)
    assert torch.equal(checkpoint.take("a", (9, 4)), a.to(target))


def test_weights_beyond_the_range_of_float16_are_refused(write: Write) -> None:
    path = write({"a": torch.tensor([1.0, 65504.0]), "b": torch.tensor([1.0, -70000.0])})
    checkpoint = Checkpoint([path], dtype=torch.float16)
    assert checkpoint.take("a", (2,)).tolist() == [1.0, 65504.0]
    with pytest.raises(ModelError, match=r"tensor b is stored as F32 and does not fit float16; use bfloat16"):
        checkpoint.take("b", (2,))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int32, "I32"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
    ids=str,
)
def test_a_quantized_tensor_is_refused(write: Write, dtype: torch.dtype, name: str) -> None:
    checkpoint = Checkpoint([write({"a": torch.zeros(4, 4).to(dtype)})])
    expected = rf"tensor a is stored as {name}; quantized checkpoints are not supported"
    with pytest.raises(ModelError, match=expected):
        checkpoint.take("a", (4, 4))


def test_a_packed_weight_under_another_name_is_told(write: Write) -> None:
    checkpoint = Checkpoint([write({"q_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)})])
    with pytest.raises(ModelError, match=r"no tensor q_proj\.weight, but q_proj\.qweight as I32; quantized"):
        checkpoint.take("q_proj.weight", (4, 32))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
    ],
)
def test_another_prefix_is_told(write: Write, stored: str, wanted: str) -> None:
    checkpoint = Checkpoint([write({stored: random(2), "model.layers.10.mlp.up_proj.weight": random(2)})])
    with pytest.raises(ModelError, match=re.escape(f"has {stored} where {wanted} is expected")):
        checkpoint.take(wanted, (2,))


def test_a_tensor_that_is_not_there(write: Write) -> None:
    checkpoint = Checkpoint([write({"model.layers.1.input_layernorm.weight": random(2)})])
    with pytest.raises(ModelError, match=r"no tensor model\.norm\.weight, which config\.json asks for"):
        checkpoint.take("model.norm.weight", (2,))
    assert not checkpoint.has("model.norm.weight")
    assert checkpoint.has(EMBEDDING)


def test_a_part_of_another_shape(write: Write) -> None:
    checkpoint = Checkpoint([write({"a": random(3, 4)})])
    with pytest.raises(ModelError, match=r"tensor a has shape \(3, 4\), config\.json asks for \(4, 3\)"):
        checkpoint.take_into(torch.empty(4, 3), "a")


def test_equal_values_are_found_equal_in_the_dtype_they_would_be_read_in(write: Write) -> None:
    # More rows than are compared at a time; only bfloat16 rounds the third tensor to the first.
    a = random(2100, 3).bfloat16().float()
    other = a.clone()
    other[2099, 2] += 1
    checkpoint = Checkpoint([write({"a": a, "other": other, "near": a * (1 + 2**-12)})])

    assert checkpoint.holds(a, "a")
    assert not checkpoint.holds(a, "other")
    assert not checkpoint.holds(a, "near")
    assert checkpoint.holds(a.bfloat16(), "near")
    with pytest.raises(ModelError, match=r"a has shape \(2100, 3\), config.json asks for \(2100, 4\)"):
        checkpoint.holds(torch.zeros(2100, 4), "a")


def test_progress_is_in_bytes_of_the_file_and_ends_at_its_size(write: Write) -> None:
    path = write({"a": random(10), "b": random(4, dtype=torch.bfloat16), "x.inv_freq": random(8)})
    told: list[tuple[int, int]] = []
    checkpoint = Checkpoint([path], report=lambda done, total: told.append((done, total)))
    checkpoint.take(EMBEDDING, (5, 3))
    checkpoint.take("a", (10,))
    checkpoint.take("b", (4,))
    checkpoint.ignore(".inv_freq")
    checkpoint.check_all_read()
    assert told == [(60, 140), (100, 140), (108, 140), (140, 140)]


def test_a_tensor_in_two_files(write: Write, tmp_path: Path) -> None:
    second = tmp_path / "second.safetensors"
    save_file({"a": random(2, seed=2)}, second)
    with pytest.raises(
        ModelError, match=r"second\.safetensors and .*model\.safetensors both have a tensor a"
    ):
        Checkpoint([write({"a": random(2)}), second])


def test_a_truncated_file(write: Write) -> None:
    path = write({"a": random(100)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        Checkpoint([path])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"shard\.safetensors cannot be read"):
        Checkpoint([tmp_path / "shard.safetensors"])
