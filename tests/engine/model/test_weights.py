"""Everything that can be wrong with a checkpoint is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loading import load_decoder
from engine.model.weights import Checkpoint
from tests.engine.tiny_models import Reference, load_runner, logits_of, make_request

Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> Decoder:
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return load_decoder(config, Checkpoint(sorted(folder.glob("*.safetensors"))))


@pytest.fixture
def edited(reference_model: Reference, tmp_path: Path) -> Callable[[Callable[[Tensors], object]], Path]:
    """A copy of a checkpoint after a change to its tensors."""

    def edit(change: Callable[[Tensors], object]) -> Path:
        source, _ = reference_model(tie_word_embeddings=False)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        shutil.copy(source / "config.json", tmp_path)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return edit


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"]
)
def test_a_missing_tensor(edited: Callable[[Callable[[Tensors], object]], Path], name: str) -> None:
    with pytest.raises(ModelError, match=f"no tensor {name}"):
        load(edited(lambda tensors: tensors.pop(name)))


def test_a_tensor_of_another_shape(edited: Callable[[Callable[[Tensors], object]], Path]) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=rf"{name} has shape \(60, 83\), config.json asks for \(60, 84\)"):
        load(edited(lambda tensors: tensors.update({name: torch.zeros(60, 83)})))


def test_a_tensor_that_nobody_reads(edited: Callable[[Callable[[Tensors], object]], Path]) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(ModelError, match=name):
        load(edited(lambda tensors: tensors.update({name: torch.zeros(20)})))


def test_stored_rope_frequencies_are_not_an_error(
    edited: Callable[[Callable[[Tensors], object]], Path],
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    assert load(edited(lambda tensors: tensors.update({name: torch.zeros(10)}))).dtype is torch.float32


def test_a_truncated_file(edited: Callable[[Callable[[Tensors], object]], Path]) -> None:
    path = edited(lambda _tensors: None) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        Checkpoint([path])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"shard\.safetensors cannot be read"):
        Checkpoint([tmp_path / "shard.safetensors"])


def test_shards_are_one_checkpoint(reference_model: Reference, tmp_path: Path) -> None:
    folder, reference = reference_model(tie_word_embeddings=False)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]

    whole, sharded = (
        logits_of(load_runner(path), [(make_request(prompt, block_ids=[2, 5]), 8)])[0]
        for path in (folder, tmp_path)
    )

    assert torch.equal(whole, sharded)
