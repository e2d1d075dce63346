"""The search for the first layer that is not finite, on models that are broken in a known place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import NonFiniteLogits
from baton.sampling import SamplingParams
from engine.batch_builder import Chunk, build_batch
from engine.config import EngineConfig
from engine.load import load_engine
from engine.loop import EngineLoop
from engine.runner import ModelRunner
from tests.engine.tiny_models import Reference, make_request


def broken(
    source: Path, folder: Path, weight: str, *, row: int | None = None, debug: bool = True
) -> ModelRunner:
    """A runner of a checkpoint in which a weight, or one row of it, is infinite."""
    shutil.copytree(source, folder)
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    weights[weight][slice(None) if row is None else row] = torch.inf
    save_file(weights, file, metadata={"format": "pt"})
    return load_engine(
        EngineConfig(model=str(folder), block_size=4, kv_cache_bytes=200_000, debug_nonfinite=debug)
    )


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("weight", ["self_attn.o_proj", "mlp.down_proj"])
def test_the_error_names_the_first_broken_layer(
    reference_model: Reference, tmp_path: Path, layer: int, weight: str
) -> None:
    folder, _ = reference_model()
    runner = broken(folder, tmp_path / "model", f"model.layers.{layer}.{weight}.weight")
    loop = EngineLoop(runner, EngineConfig(block_size=4, chunk_tokens=3, max_running=4))

    with pytest.raises(NonFiniteLogits, match=f"layer {layer} of 3"):
        loop.generate([[5, 6, 7, 8, 9, 10, 11]], SamplingParams(temperature=0, max_tokens=2))


def test_the_final_norm_is_named_too(reference_model: Reference, tmp_path: Path) -> None:
    folder, _ = reference_model()
    runner = broken(folder, tmp_path / "model", "model.norm.weight")

    output = runner.run(build_batch(1, [Chunk.of(make_request([1, 2, 3], block_ids=[0]), 3)], 4))

    assert output.nonfinite_at == {0: "the final norm or the output head"}


def test_only_broken_sequences_are_named(reference_model: Reference, tmp_path: Path) -> None:
    folder, _ = reference_model(tie_word_embeddings=False)
    runner = broken(folder, tmp_path / "model", "model.embed_tokens.weight", row=50)
    chunks = [
        Chunk.of(make_request(tokens, number=number, block_ids=[number]), 3)
        for number, tokens in enumerate([[1, 2, 3], [1, 50, 3], [4, 5, 6]])
    ]

    output = runner.run(build_batch(1, chunks, 4))

    assert output.finite.tolist() == [True, False, True]
    assert output.nonfinite_at == {1: "the embedding"}


def test_a_broken_prompt_row_is_found_by_its_score(reference_model: Reference, tmp_path: Path) -> None:
    folder, _ = reference_model(tie_word_embeddings=False)
    runner = broken(folder, tmp_path / "model", "model.embed_tokens.weight", row=50)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    chunk = Chunk.of(make_request([1, 50, 3, 4], block_ids=[0], params=params), 2)

    output = runner.run(build_batch(1, [chunk], 4))

    assert output.scores is not None
    assert not output.scores.finite.all()
    assert output.nonfinite_at == {0: "the embedding"}


def test_without_the_setting_nothing_is_searched(reference_model: Reference, tmp_path: Path) -> None:
    folder, _ = reference_model()
    runner = broken(folder, tmp_path / "model", "model.layers.1.mlp.down_proj.weight", debug=False)

    output = runner.run(build_batch(1, [Chunk.of(make_request([1, 2, 3], block_ids=[0]), 3)], 4))

    assert output.finite.tolist() == [False]
    assert output.nonfinite_at == {}
