"""Models whose layers are computed by the kernels for CPUs, against transformers; and who gets them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.cpu import choice, layer
from engine.cpu.attention import CpuAttention
from engine.load import load_engine
from engine.loop import EngineLoop
from engine.model.plain_pass import PlainPass
from engine.runner import ModelRunner
from tests.engine.families import FAMILIES
from tests.engine.tiny_models import (
    Families,
    greedy_reference,
    load_runner,
    logits_of,
    prompts_of,
    reference_logits,
    scattered,
    shuffled_blocks,
)

CASES = sorted(FAMILIES)
SMALL = EngineConfig(kv_cache_bytes=1 << 20, block_size=4, max_running=4)


def with_kernels(runner: ModelRunner) -> ModelRunner:
    runner.model.forward_pass = choice.kernel_pass(runner.model.config, runner.model.dtype)
    return runner


@pytest.mark.parametrize("name", CASES)
def test_prompts_chunks_and_decode_tokens_in_one_batch_give_transformers_logits(
    family_model: Families, name: str
) -> None:
    folder, reference = family_model(name)
    runner = with_kernels(load_runner(folder, layout="NHD" if len(name) % 2 else "HND"))
    free = shuffled_blocks()
    prompts = prompts_of(3, 30, 20, 11)
    requests = [scattered(prompt, free) for prompt in prompts]
    logits_of(runner, [(requests[0], 2), (requests[1], 29), (requests[2], 6)])

    counts = [1, 1, 14, 11]
    computed = logits_of(runner, list(zip(requests, counts, strict=True)))

    for prompt, count, logits in zip(prompts, counts, computed, strict=True):
        expected = reference_logits(reference, prompt)[-count:]
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama untied, 4 heads on 2", "gemma3"])
def test_a_whole_engine_gives_transformers_tokens(family_model: Families, name: str) -> None:
    folder, reference = family_model(name)
    prompts = prompts_of(5, 13, 1)
    config = EngineConfig(max_batch_tokens=32, chunk_tokens=12, mixed_tokens=12, max_running=4)
    loop = EngineLoop(with_kernels(load_runner(folder)), config)

    answers = loop.generate(prompts, SamplingParams(temperature=0, max_tokens=12))

    assert [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)] == [
        greedy_reference(reference, prompt, 12) for prompt in prompts
    ]


@pytest.mark.parametrize("name", ["qwen3 head_dim 80 of hidden 60", "gemma3", "qwen2"])
def test_bfloat16_is_at_least_as_close_to_fp32_as_plain_operators_are(
    family_model: Families, name: str
) -> None:
    folder, reference = family_model(name)
    prompts = prompts_of(*range(8, 40, 3))
    squares = {"plain": 0.0, "kernels": 0.0}
    for side in squares:
        runner = load_runner(folder, dtype=torch.bfloat16)
        if side == "kernels":
            with_kernels(runner)
        free = shuffled_blocks()
        requests = [scattered(prompt, free) for prompt in prompts]
        begun = logits_of(runner, [(request, len(request.token_ids) - 4) for request in requests])
        steps = [logits_of(runner, [(request, 1) for request in requests]) for _ in range(4)]
        for prompt, *parts in zip(prompts, begun, *steps, strict=True):
            squares[side] += (torch.cat(parts) - reference_logits(reference, prompt)).square().sum().item()
    assert 0 < squares["kernels"] < 1.1 * squares["plain"]


def load(family_model: Families, **settings: str) -> ModelRunner:
    folder, _ = family_model("llama tied")
    return load_engine(dataclasses.replace(SMALL, model=str(folder), **settings))


def is_kernels(runner: ModelRunner) -> bool:
    found = runner.model.forward_pass
    assert isinstance(found, PlainPass)
    return found.layer_code is layer


def test_bfloat16_is_computed_by_kernels_and_float32_only_if_asked_for(family_model: Families) -> None:
    assert is_kernels(load(family_model, dtype="bfloat16"))
    assert not is_kernels(load(family_model, dtype="bfloat16", kernels="torch"))
    assert not is_kernels(load(family_model, dtype="bfloat16", kv_dtype="float32"))
    assert not is_kernels(load(family_model, dtype="float32"))
    assert is_kernels(load(family_model, dtype="float32", kernels="numba"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float16"}, "weights are torch.float16 and the cache is torch.float16"),
        ({"dtype": "bfloat16", "kv_dtype": "float32"}, "the cache is torch.float32"),
    ],
)
def test_kernels_that_do_not_suit_are_refused_with_the_reason(
    family_model: Families, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        load(family_model, kernels="numba", **settings)
    assert raised.value.field == "kernels"
    with pytest.raises(ConfigError, match="kernels = numba exclude each other"):
        dataclasses.replace(SMALL, kernels="numba", compile=True)


def test_without_numba_or_the_runtime_layers_are_plain(
    family_model: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("engine.cpu.team.has_team", lambda: False)
        assert not is_kernels(load(family_model, dtype="bfloat16"))
        with pytest.raises(ConfigError, match="another OpenMP runtime"):
            load(family_model, dtype="bfloat16", kernels="numba")
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert not is_kernels(load(family_model, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="package numba is missing"):
        load(family_model, dtype="bfloat16", kernels="numba")


SECOND_START = """
from engine.cpu.layer_kernels import gate_kernel
print(gate_kernel(4, is_silu=True)._compiled.cache_hits)
"""


def test_compiled_kernels_are_kept_and_a_folder_that_cannot_be_written_costs_only_that(
    tmp_path: Path,
) -> None:
    def start(folder: Path) -> int:
        environment = {"BATON_CACHE_DIR": str(folder), "PATH": "/usr/bin"}
        command = [sys.executable, "-c", SECOND_START]
        ran = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[3],
        )
        return int(ran.stdout)

    assert [start(tmp_path / "cache") for _ in range(2)] == [0, 1]
    (tmp_path / "file").touch()
    assert start(tmp_path / "file") == 0


def test_attention_is_that_of_the_kernels(family_model: Families) -> None:
    runner = load(family_model, dtype="bfloat16")
    found = runner.model.forward_pass
    assert isinstance(found, PlainPass)
    assert isinstance(found.attention_code, CpuAttention)
