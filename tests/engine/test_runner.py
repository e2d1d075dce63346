"""Loading an engine from a folder, and one step of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import ConfigError, ModelError
from baton.models import ModelDir
from baton.sampling import SamplingParams
from engine.batch_builder import Chunk, build_batch
from engine.config import EngineConfig
from engine.load import load_engine
from engine.load import load_runner as load_worker_runner
from tests.engine.tiny_models import Reference, load_runner, make_request


def test_an_engine_is_loaded_as_configured(reference_model: Reference) -> None:
    folder, _ = reference_model()
    config = EngineConfig(
        model=str(folder), dtype="bfloat16", kv_dtype="float16", block_size=8, layout="NHD",
        kv_cache_bytes=100_000,
    )  # fmt: skip

    runner = load_engine(config)

    # 2 x 3 layers x 1 head x 20 elements x 2 bytes x 8 tokens = 1920 bytes a block.
    assert runner.cache.shape.num_blocks == 52
    assert runner.cache.shape.dtype is torch.float16
    assert runner.model.dtype is torch.bfloat16
    assert runner.cache.shape.layout == "NHD"
    runner.warm_up()
    assert bool(runner.cache.data.isfinite().all())


def changed(source: Path, folder: Path, **settings: object) -> Path:
    """A copy of a model folder whose config.json says this."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("architectures", "named"),
    [(None, "names no architecture"), ("LlamaForCausalLM", "'LlamaForCausalLM'; write a list"), (5, "is 5")],
)
def test_a_worker_refuses_what_is_no_list_of_architectures(
    reference_model: Reference, tmp_path: Path, architectures: object, named: str
) -> None:
    folder = changed(reference_model()[0], tmp_path / "m", architectures=architectures)
    config = EngineConfig(model=str(folder), kv_cache_bytes=100_000)

    with pytest.raises(ModelError, match=rf"^{folder}/config\.json.* {named}"):
        load_worker_runner(config, ModelDir.open(folder))


def test_dual_chunk_attention_is_not_computed_and_the_log_says_so(
    reference_model: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = reference_model()
    chunked = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 40}
    folder = changed(source, tmp_path / "m", dual_chunk_attention_config=chunked)

    runner = load_engine(EngineConfig(model=str(folder), kv_cache_bytes=100_000))
    load_engine(EngineConfig(model=str(source), kv_cache_bytes=100_000))

    assert runner.model.config.max_model_len == 40
    (said,) = [record.msg for record in caplog.records if record.name == "engine.load"]
    assert said["event"].startswith("dual chunk attention is not supported")  # type: ignore[index]
    assert said["max_model_len"] == 40  # type: ignore[index]


def test_a_cache_below_one_block_is_refused(reference_model: Reference) -> None:
    folder, _ = reference_model()
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        load_engine(EngineConfig(model=str(folder), kv_cache_bytes=1000))


def test_a_half_precision_cache_is_close_to_a_full_one(reference_model: Reference) -> None:
    folder, reference = reference_model()
    config = EngineConfig(model=str(folder), kv_dtype="float16", block_size=4, kv_cache_bytes=50_000)
    runner = load_engine(config)
    prompt = list(range(30, 55))
    request = make_request(prompt, block_ids=[9, 2, 7, 1, 5, 8, 3])

    for count in (11, 13, 1):  # a beginning, a continued chunk and a decode step
        batch = build_batch(1, [Chunk.of(request, count)], 4)
        logits = runner.logits(dataclasses.replace(batch, logits_rows=np.array([count - 1])))
        request.num_computed_tokens += count

    expected = reference(torch.tensor([prompt])).logits[0, -1]
    assert (logits[0] - expected).abs().max() < 0.02


def test_a_poisoned_sequence_fails_alone(reference_model: Reference) -> None:
    folder, _ = reference_model()
    runner = load_runner(folder)
    healthy = make_request([5, 6, 7, 8, 9, 10], block_ids=[11, 3])
    poisoned = make_request([5, 6, 7, 8, 9, 10], number=1, block_ids=[4, 6], num_computed_tokens=5)

    # The cache is NaN, and the second request claims that five tokens are computed.
    output = runner.run(build_batch(3, [Chunk.of(healthy, 6), Chunk.of(poisoned, 1)], 4))

    assert output.step_id == 3
    assert output.finite.tolist() == [True, False]


def test_scores_do_not_depend_on_how_many_are_computed_at_a_time(
    reference_model: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = reference_model()
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    request = make_request(list(range(20, 30)), block_ids=[1, 5, 2], params=params)
    batch = build_batch(1, [Chunk.of(request, 10)], 4)
    at_once = load_runner(folder).run(batch).scores
    monkeypatch.setattr("engine.runner._MAX_SCORED_LOGITS", 4 * 101)

    in_slices = load_runner(folder).run(batch).scores

    assert at_once is not None
    assert in_slices is not None
    exact = torch.log_softmax(reference(torch.tensor([request.token_ids])).logits[0].double(), -1)
    expected = [exact[t - 1, request.token_ids[t]].item() for t in range(1, 10)]
    assert at_once.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    assert in_slices.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    assert in_slices.top.token_ids.tolist() == exact[:9].topk(2).indices.tolist()


def test_the_logit_of_a_scored_token_is_fp32_however_unlikely(reference_model: Reference) -> None:
    folder, _ = reference_model()
    model = load_runner(folder, dtype=torch.bfloat16).model
    normed_RD = torch.randn(40, 60, generator=torch.Generator().manual_seed(3)).bfloat16()
    head_VD = torch.stack([model.logits(row[None])[0] for row in torch.eye(60).bfloat16()], dim=1)
    exact_RV = normed_RD.float() @ head_VD.T
    least_R = exact_RV.argmin(dim=-1)

    refined = model.logits(normed_RD, least_R).gather(1, least_R[:, None])[:, 0]
    rounded = model.logits(normed_RD).gather(1, least_R[:, None])[:, 0]

    expected = exact_RV.gather(1, least_R[:, None])[:, 0]
    assert torch.allclose(refined, expected, atol=1e-4)
    assert not torch.allclose(rounded, expected, atol=1e-3)
