"""Many requests through scheduler, cache and model at once, against transformers one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.loop import EngineLoop
from tests.engine.tiny_models import Reference, greedy_reference, load_runner, prompts_of


def engine_loop(folder: Path, *, num_blocks: int = 120, **settings: Any) -> EngineLoop:
    config = EngineConfig(model=str(folder), block_size=4, **settings)
    return EngineLoop(load_runner(folder, num_blocks=num_blocks), config)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_tokens": 7, "max_batch_tokens": 19, "max_running": 5},
        {"chunk_tokens": 5, "max_batch_tokens": 9, "max_running": 2},
    ],
    ids=["all at once", "chunks of seven", "two at a time"],
)
def test_greedy_tokens_equal_those_of_transformers(
    reference_model: Reference, settings: dict[str, Any]
) -> None:
    folder, reference = reference_model()
    prompts = prompts_of(3, 50, 17, 1, 29, 8, 66)
    loop = engine_loop(folder, num_blocks=200, **settings)

    answers = loop.generate(prompts, SamplingParams(temperature=0, max_tokens=24))

    for prompt, answer in zip(prompts, answers, strict=True):
        assert prompt + answer == greedy_reference(reference, prompt, 24)
    assert loop.pool.num_free == 200


def test_drawn_tokens_do_not_depend_on_how_requests_are_batched(reference_model: Reference) -> None:
    folder, _ = reference_model()
    prompts = prompts_of(12, 40, 5)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=2**63 + 11, max_tokens=20)

    together = engine_loop(folder).generate(prompts, params)
    loop = engine_loop(folder, chunk_tokens=3, max_batch_tokens=10, max_running=2)
    apart = [loop.generate([prompt], params)[0] for prompt in prompts]

    assert together == apart
    assert len({tuple(answer) for answer in together}) == 3


def test_a_second_run_reuses_blocks_that_hold_foreign_tokens(reference_model: Reference) -> None:
    folder, reference = reference_model()
    loop = engine_loop(folder, num_blocks=24)
    prompts = prompts_of(60, 21)

    for prompt in (prompts[0], prompts[1], prompts[0]):
        (answer,) = loop.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
        assert prompt + answer == greedy_reference(reference, prompt, 8)
    assert torch.is_inference_mode_enabled() is False
