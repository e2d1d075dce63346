"""A checkpoint that config.json does not describe is refused by name; heads are told apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

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
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
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


def of_transformers(folder: Path) -> torch.Tensor:
    """The same of the folder as transformers reads it."""
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.tensor([[3, 1, 4]])).logits[0]


def assert_as_transformers(folder: Path) -> torch.Tensor:
    computed = logits(folder)
    torch.testing.assert_close(computed, of_transformers(folder), atol=1e-4, rtol=0)
    return computed


def with_equal_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def without_head(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def without_embedding(tensors: Tensors) -> None:
    del tensors["model.embed_tokens.weight"]


tied_heads = pytest.mark.parametrize("change", [with_equal_head, without_head, without_embedding])


@tied_heads
def test_a_tied_head_is_the_embedding_whichever_is_stored(
    edited: Edited, change: Callable[[Tensors], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert_as_transformers(set_tied(edited(change), tied=True))
    assert caplog.records == []


@tied_heads
def test_a_tied_head_is_in_memory_once(edited: Edited, change: Callable[[Tensors], None]) -> None:
    model = load(set_tied(edited(change), tied=True))

    assert model.weights.head is model.weights.embedding


def test_a_stored_head_that_differs_is_used_though_config_json_ties_it(
    edited: Edited, reference_model: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    folder = set_tied(edited(lambda _tensors: None), tied=True)
    _, untied = reference_model(tie_word_embeddings=False)

    computed = assert_as_transformers(folder)

    with torch.no_grad():
        torch.testing.assert_close(computed, untied(torch.tensor([[3, 1, 4]])).logits[0], atol=1e-4, rtol=0)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "engine.model.loading"]
    assert "has a head of its own, which is used; set tie_word_embeddings to false" in said


def test_a_tied_head_of_another_shape(edited: Edited) -> None:
    folder = edited(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(103, 60)}))
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \(103, 60\), config.json asks for"):
        load(set_tied(folder, tied=True))


def test_neither_embedding_nor_head(edited: Edited) -> None:
    folder = edited(lambda tensors: [without_head(tensors), without_embedding(tensors)])
    with pytest.raises(ModelError, match=r"no tensor model\.embed_tokens\.weight"):
        load(set_tied(folder, tied=True))


def test_an_equal_head_of_an_untied_model(edited: Edited) -> None:
    assert_as_transformers(set_tied(edited(with_equal_head), tied=False))


def test_an_untied_head_is_not_the_embedding(edited: Edited) -> None:
    assert_as_transformers(edited(lambda _tensors: None))


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
