"""A checkpoint that config.json does not describe is refused by name; heads are told apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ModelError
from baton.model_config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loading import load_decoder
from engine.model.weights import Checkpoint
from tests.engine.tiny_models import Reference, load_runner, logits_of, make_request

Tensors = dict[str, torch.Tensor]
Edited = Callable[[Callable[[Tensors], object]], Path]


def load(folder: Path) -> Decoder:
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return load_decoder(config, Checkpoint(sorted(folder.glob("*.safetensors"))))


@pytest.fixture
def edited(reference_model: Reference, tmp_path: Path) -> Edited:
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
def test_a_missing_tensor(edited: Edited, name: str) -> None:
    with pytest.raises(ModelError, match=f"no tensor {name}"):
        load(edited(lambda tensors: tensors.pop(name)))


def test_a_tensor_of_another_shape(edited: Edited) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=rf"{name} has shape \(60, 83\), config.json asks for \(60, 84\)"):
        load(edited(lambda tensors: tensors.update({name: torch.zeros(60, 83)})))


def test_a_tensor_that_nobody_reads(edited: Edited) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(ModelError, match=name):
        load(edited(lambda tensors: tensors.update({name: torch.zeros(20)})))


def test_stored_rope_frequencies_are_not_an_error(
    edited: Edited,
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    assert load(edited(lambda tensors: tensors.update({name: torch.zeros(10)}))).dtype is torch.float32


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


def set_tied(folder: Path, *, tied: bool) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))
    return folder


def logits(folder: Path) -> torch.Tensor:
    return logits_of(load_runner(folder), [(make_request([3, 1, 4], block_ids=[1]), 3)])[0]


def test_tied_heads_stored_or_not_are_the_embedding(edited: Edited, tmp_path: Path) -> None:
    folder = set_tied(edited(lambda _tensors: None), tied=True)
    stored = logits(folder)
    without = logits(set_tied(edited(lambda tensors: tensors.pop("lm_head.weight")), tied=True))
    assert torch.equal(stored, without)

    as_head = edited(
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert torch.equal(stored, logits(set_tied(as_head, tied=False)))


def test_an_untied_head_is_not_the_embedding(edited: Edited, reference_model: Reference) -> None:
    _, reference = reference_model(tie_word_embeddings=False)
    with torch.no_grad():
        expected = reference(torch.tensor([[3, 1, 4]])).logits[0]
    torch.testing.assert_close(logits(edited(lambda _tensors: None)), expected, atol=1e-4, rtol=0)


def test_a_missing_head_is_no_tied_one(edited: Edited) -> None:
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight.*tie_word_embeddings.*without a head"):
        load(edited(lambda tensors: tensors.pop("lm_head.weight")))


def test_a_model_saved_without_its_head(edited: Edited, reference_model: Reference) -> None:
    """transformers' AutoModel saves its tensors without the prefix `model.`."""
    folder = edited(lambda _tensors: None)
    _, reference = reference_model(tie_word_embeddings=False)
    config = (folder / "config.json").read_text()
    reference.model.save_pretrained(folder)
    (folder / "config.json").write_text(config)

    with pytest.raises(
        ModelError, match=r"has embed_tokens\.weight where model\.embed_tokens\.weight is expected"
    ):
        load(folder)
