"""The decoder against transformers, in fp32, over every way of cutting sequences into steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.batch_builder import Chunk, build_batch
from engine.model.weights import Checkpoint
from engine.request import Request
from engine.runner import ModelRunner
from tests.engine.tiny_models import Reference, load_runner, logits_of, make_request

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "tied, 3 heads on 1": {},
    "untied, 4 heads on 2, head_dim 24": {
        "tie_word_embeddings": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_size": 52,
    },
    "biases everywhere, every head its own": {
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 3,
    },
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
}

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(params=["HND", "NHD"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(101) for _ in range(length)] for length in lengths]


def scattered(token_ids: list[int], free: list[int], *, block_size: int = 4, room: int = 0) -> Request:
    """A request whose blocks are taken from anywhere in the cache."""
    count = -(-(len(token_ids) + room) // block_size)
    return make_request(token_ids, block_ids=[free.pop() for _ in range(count)])


def shuffled_blocks(num_blocks: int = 120) -> list[int]:
    return random.Random(3).sample(range(num_blocks), num_blocks)


@torch.no_grad()
def reference_logits(model: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_packed_prefill_gives_the_reference_logits_at_every_position(
    reference_model: Reference, variant: dict[str, Any], layout: str
) -> None:
    folder, reference = reference_model(**variant)
    runner = load_runner(folder, layout=layout)
    free = shuffled_blocks()
    prompts = prompts_of(1, 37, 4, 63, 2)
    requests = [scattered(prompt, free) for prompt in prompts]

    computed = logits_of(runner, [(request, request.num_tokens) for request in requests])

    for prompt, logits in zip(prompts, computed, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, prompt), **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_chunks_of_seven_give_the_reference_logits_at_every_position(
    reference_model: Reference, variant: dict[str, Any], layout: str
) -> None:
    folder, reference = reference_model(**variant)
    runner = load_runner(folder, layout=layout)
    (prompt,) = prompts_of(58)
    request = scattered(prompt, shuffled_blocks())

    parts = []
    while request.num_pending_tokens:
        parts += logits_of(runner, [(request, min(7, request.num_pending_tokens))])

    torch.testing.assert_close(torch.cat(parts), reference_logits(reference, prompt), **TOLERANCE)


def test_decode_tokens_and_chunks_share_a_batch(reference_model: Reference, layout: str) -> None:
    # Three decoding sequences of very different length, a continued chunk and a new prompt.
    folder, reference = reference_model()
    runner = load_runner(folder, layout=layout)
    free = shuffled_blocks()
    prompts = prompts_of(3, 17, 141, 50, 22)
    requests = [scattered(prompt, free) for prompt in prompts]
    for request in requests[:3]:
        logits_of(runner, [(request, request.num_tokens - 1)])
    logits_of(runner, [(requests[3], 19)])

    counts = [1, 1, 1, 31, 22]
    computed = logits_of(runner, list(zip(requests, counts, strict=True)))

    for prompt, count, logits in zip(prompts, counts, computed, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, prompt)[-count:], **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_32_greedy_tokens_equal_those_of_transformers(
    reference_model: Reference, variant: dict[str, Any], layout: str
) -> None:
    folder, reference = reference_model(**variant)
    runner = load_runner(folder, layout=layout)
    free = shuffled_blocks()
    prompts = prompts_of(5, 31, 64)
    requests = [scattered(prompt, free, room=32) for prompt in prompts]

    for _ in range(32):
        step = [(request, request.num_pending_tokens) for request in requests]
        for request, logits in zip(requests, logits_of(runner, step), strict=True):
            request.token_ids.append(int(logits[-1].argmax()))

    for prompt, request in zip(prompts, requests, strict=True):
        assert request.token_ids == greedy_reference(reference, prompt, 32)


def test_only_the_wanted_rows_are_returned_and_none_may_be_wanted(reference_model: Reference) -> None:
    folder, reference = reference_model()
    runner = load_runner(folder)
    (prompt,) = prompts_of(20)
    request = scattered(prompt, shuffled_blocks())

    assert unsampled_rows(runner, request, 13) == (0, 101)

    (rest,) = logits_of(runner, [(request, 7)])
    torch.testing.assert_close(rest, reference_logits(reference, prompt)[-7:], **TOLERANCE)


def test_bfloat16_stays_close_to_the_fp32_reference(reference_model: Reference) -> None:
    folder, reference = reference_model()
    runner = load_runner(folder, dtype=torch.bfloat16)
    (prompt,) = prompts_of(40)
    request = scattered(prompt, shuffled_blocks())

    first, second = logits_of(runner, [(request, 25)]), logits_of(runner, [(request, 15)])

    expected = reference_logits(reference, prompt)
    error = (torch.cat([*first, *second]) - expected).abs().mean() / expected.abs().mean()
    assert error < 0.05


@torch.no_grad()
def greedy_reference(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in output[0]]


def unsampled_rows(runner: ModelRunner, request: Request, count: int) -> tuple[int, ...]:
    batch = build_batch(1, [Chunk.of(request, count)], runner.cache.shape.block_size)
    request.num_computed_tokens += count
    return tuple(runner.logits(batch).shape)


def test_dtype_auto_is_that_of_the_checkpoint(reference_model: Reference) -> None:
    folder, _ = reference_model()

    assert Checkpoint([folder / "model.safetensors"]).dtype is torch.float32
