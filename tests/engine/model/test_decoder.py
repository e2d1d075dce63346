"""The decoder apart from what it computes: which rows come back, and which dtype it takes.

That it computes what transformers does is tests/engine/model/test_families.py's.
"""

from __future__ import annotations

import torch

from engine.batch_builder import Chunk, build_batch
from engine.model.weights import Checkpoint
from engine.request import Request
from engine.runner import ModelRunner
from tests.engine.tiny_models import (
    Reference,
    load_runner,
    logits_of,
    prompts_of,
    reference_logits,
    scattered,
    shuffled_blocks,
)

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def test_only_the_wanted_rows_are_returned_and_none_may_be_wanted(reference_model: Reference) -> None:
    folder, reference = reference_model()
    runner = load_runner(folder)
    (prompt,) = prompts_of(20)
    request = scattered(prompt, shuffled_blocks())

    assert unsampled_rows(runner, request, 13) == (0, 101)

    (rest,) = logits_of(runner, [(request, 7)])
    torch.testing.assert_close(rest, reference_logits(reference, prompt)[-7:], **TOLERANCE)


def unsampled_rows(runner: ModelRunner, request: Request, count: int) -> tuple[int, ...]:
    batch = build_batch(1, [Chunk.of(request, count)], runner.cache.shape.block_size)
    request.num_computed_tokens += count
    return tuple(runner.logits(batch).shape)


def test_dtype_auto_is_that_of_the_checkpoint(reference_model: Reference) -> None:
    folder, _ = reference_model()

    assert Checkpoint([folder / "model.safetensors"]).dtype is torch.float32
