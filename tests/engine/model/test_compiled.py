"""Compiled layers against eager ones, what they are compiled for, and what happens where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config

from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.model.compiled import Compilation, CompiledLayer
from engine.model.plain_pass import PlainPass
from engine.runner import ModelRunner
from tests.engine.tiny_models import (
    Families,
    Reference,
    load_runner,
    logits_of,
    prompts_of,
    scattered,
    shuffled_blocks,
)

MIXED = prompts_of(5, 31, 64)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler as a new process has it, and its folder.

    But for one thing: it takes this machine's vector units for granted. To try each takes longer
    than to compile a layer.
    """
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BATON_CACHE_DIR", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    torch._dynamo.reset()
    with (
        dynamo_config.patch(error_on_recompile=False),
        inductor_config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}),
    ):
        yield folder
    torch._dynamo.reset()


class CountingBackend:
    """Compiles nothing, and counts what it is asked to compile."""

    def __init__(self) -> None:
        self.num_programs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        self.num_programs += 1
        return graph.forward


def use(runner: ModelRunner, folder: Path, backend: Callable[..., Any]) -> CompiledLayer:
    """Compiles the runner's layers with a backend of the test."""
    layer = CompiledLayer(folder, backend=backend)
    runner.model.forward_pass = PlainPass(runner.model.config, layer)
    layer.compile(runner._compute_dummy)
    return layer


def layer_of(runner: ModelRunner) -> CompiledLayer:
    layer = runner.model.forward_pass.layer_code
    assert isinstance(layer, CompiledLayer)
    return layer


def answers_of(runner: ModelRunner, folder: Path, prompts: Sequence[list[int]] = MIXED) -> list[list[int]]:
    """Greedy answers in batches that mix chunks of seven and decode tokens; at last one token is alone."""
    config = EngineConfig(model=str(folder), block_size=4, chunk_tokens=7, max_batch_tokens=19, max_running=3)
    return EngineLoop(runner, config).generate(prompts, GREEDY)


def mixed_logits(runner: ModelRunner) -> torch.Tensor:
    """Logits of every token of a batch of decode tokens, a chunk and whole prompts."""
    free = shuffled_blocks()
    requests = [scattered(prompt, free) for prompt in prompts_of(3, 17, 50, 22, 41)]
    for request in requests[:2]:
        logits_of(runner, [(request, request.num_tokens - 1)])
    logits_of(runner, [(requests[2], 19)])
    return torch.cat(logits_of(runner, list(zip(requests, [1, 1, 31, 22, 41], strict=True))))


def assert_equal_logits(runner: ModelRunner, eager: ModelRunner) -> None:
    """But for the order of sums: 1e-5 of the largest."""
    expected = mixed_logits(eager)
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(mixed_logits(runner), expected, rtol=0.0, atol=bound)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.msg for record in caplog.records if record.levelno == logging.WARNING]  # type: ignore[misc]


def test_machine_code_gives_the_tokens_of_eager_layers_and_is_read_from_disk_at_the_next_start(
    family_model: Families,
) -> None:
    folder, _ = family_model("llama tied")
    first = load_runner(folder).compile()
    torch._dynamo.reset()
    runner = load_runner(folder)

    second = runner.compile()

    assert first == Compilation(num_programs=4, is_cached=False)
    assert second == Compilation(num_programs=4, is_cached=True)
    assert_equal_logits(runner, load_runner(folder))
    assert answers_of(runner, folder) == answers_of(load_runner(folder), folder)
    assert not layer_of(runner).is_eager


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_machine_code_of_other_families_gives_the_tokens_of_eager_layers(
    family_model: Families, compiler: Path, name: str
) -> None:
    # Two equally long prompts never leave one token alone, which would be two programs more to compile.
    folder, _ = family_model(name)
    runner, prompts = load_runner(folder), prompts_of(7, 7)
    layer = CompiledLayer(compiler)
    runner.model.forward_pass = PlainPass(runner.model.config, layer)

    compilation = layer.compile(lambda num_tokens: runner._compute_dummy(max(2, num_tokens)))

    assert compilation == Compilation(num_programs=2, is_cached=False)
    assert_equal_logits(runner, load_runner(folder))
    assert answers_of(runner, folder, prompts) == answers_of(load_runner(folder), folder, prompts)
    assert not layer.is_eager


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_four_programs_serve_every_number_of_layers_and_tokens(
    reference_model: Reference, compiler: Path, num_layers: int
) -> None:
    folder, _ = reference_model(num_hidden_layers=num_layers)
    runner, backend = load_runner(folder), CountingBackend()
    layer = use(runner, compiler, backend)

    for length in (2, 1, 3, 20, 7, 131):
        logits_of(runner, [(scattered(prompts_of(length)[0], shuffled_blocks()), length)])
    answers_of(runner, folder)

    assert backend.num_programs == 4
    assert not layer.is_eager


def test_a_model_with_experts_in_some_layers_has_two_programs_more(
    family_model: Families, compiler: Path
) -> None:
    folder, _ = family_model("qwen3 moe, dense middle")
    runner, backend = load_runner(folder), CountingBackend()
    layer = use(runner, compiler, backend)

    answers = answers_of(runner, folder)

    assert backend.num_programs == 6
    assert not layer.is_eager
    assert answers == answers_of(load_runner(folder), folder)


def test_a_compiler_that_fails_leaves_eager_layers_and_a_warning(
    family_model: Families, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_graph: object, _inputs: object) -> Callable[..., Any]:
        raise NotImplementedError("no such instruction")

    folder, _ = family_model("llama tied")
    runner = load_runner(folder)
    layer = use(runner, compiler, failing)

    assert layer.is_eager
    (warning,) = warnings_of(caplog)
    assert warning["event"] == "layers are not compiled"
    assert "no such instruction" in warning["reason"]
    assert "without --compile" in warning["remedy"]
    assert torch.equal(mixed_logits(runner), mixed_logits(load_runner(folder)))


def test_without_a_cpp_compiler_the_warning_names_it(
    family_model: Families, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = family_model("llama tied")
    runner = load_runner(folder)

    with inductor_config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        assert runner.compile() is None

    (warning,) = warnings_of(caplog)
    assert "/nowhere/g++" in warning["reason"]
    assert "install g++" in warning["remedy"]
    assert answers_of(runner, folder) == answers_of(load_runner(folder), folder)


def test_what_was_not_compiled_before_serving_is_not_compiled_later(
    family_model: Families, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = family_model("llama tied")
    runner, backend = load_runner(folder), CountingBackend()
    layer = use(runner, compiler, backend)
    other = load_runner(folder, dtype=torch.bfloat16)
    other.model.forward_pass = PlainPass(other.model.config, layer)

    logits = mixed_logits(other)

    assert backend.num_programs == 4
    assert layer.is_eager
    (warning,) = warnings_of(caplog)
    assert "dtype mismatch" in warning["reason"]
    assert torch.equal(logits, mixed_logits(load_runner(folder, dtype=torch.bfloat16)))


def test_a_folder_that_others_can_write_is_not_used(
    family_model: Families, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (compiler / "compiled").mkdir()
    (compiler / "compiled").chmod(0o777)
    folder, _ = family_model("llama tied")

    assert load_runner(folder).compile() is None

    (warning,) = warnings_of(caplog)
    assert "chmod 700" in warning["reason"]
    assert list((compiler / "compiled").iterdir()) == []


def test_the_folder_is_made_for_its_owner_alone(family_model: Families, compiler: Path) -> None:
    layer = CompiledLayer(compiler / "a" / "b", backend=CountingBackend())
    runner = load_runner(family_model("llama tied")[0])
    runner.model.forward_pass = PlainPass(runner.model.config, layer)

    assert layer.compile(runner._compute_dummy) is not None

    assert (compiler / "a" / "b").stat().st_mode & 0o777 == 0o700
