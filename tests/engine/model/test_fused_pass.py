"""The layers with interpreted kernels against transformers and against the plain pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.sampling import SamplingParams
from engine.batch import ForwardBatch
from engine.batch_builder import Chunk, build_batch
from engine.config import EngineConfig
from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.contests import EMBED_RMS_NORM_QKV, PREFILL_ATTENTION
from engine.kernels.prefill_attention import prefill_attention
from engine.kv_cache import KVCache
from engine.loop import EngineLoop
from engine.model.fused_pass import FusedPass
from engine.request import Request
from engine.runner import ModelRunner
from engine.stored import DONE, Stored
from tests.engine.tiny_models import (
    Families,
    greedy_reference,
    load_runner,
    logits_of,
    prompts_of,
    reference_logits,
    scattered,
    shuffled_blocks,
    with_all_logits,
)

# The vendor's operators take the place of the kernels that have any.
VENDOR = Choices(crossings={EMBED_RMS_NORM_QKV: None, PREFILL_ATTENTION: None})
# Biases; norms of heads and behind attention, windows and two rotary embeddings; experts.
CASES = [("qwen2", UNMEASURED), ("gemma3", UNMEASURED), ("mixtral", UNMEASURED), ("qwen2", VENDOR)]
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def fused(runner: ModelRunner, choices: Choices = UNMEASURED) -> ModelRunner:
    runner.model.forward_pass = FusedPass(runner.model.config, choices)
    return runner


@pytest.mark.parametrize(("name", "choices"), CASES)
def test_prompts_chunks_and_decode_tokens_in_one_batch_give_transformers_logits(
    family_model: Families, name: str, choices: Choices
) -> None:
    folder, reference = family_model(name)
    runner = fused(load_runner(folder, layout="NHD" if name == "qwen2" else "HND"), choices)
    free = shuffled_blocks()
    prompts = prompts_of(3, 30, 20, 11)
    requests = [scattered(prompt, free) for prompt in prompts]
    logits_of(runner, [(requests[0], 2), (requests[1], 29), (requests[2], 6)])

    counts = [1, 1, 14, 11]
    computed = logits_of(runner, list(zip(requests, counts, strict=True)))

    for prompt, count, logits in zip(prompts, counts, computed, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, prompt)[-count:], **TOLERANCE)


def test_a_whole_engine_gives_transformers_tokens(family_model: Families) -> None:
    folder, reference = family_model("llama untied, 4 heads on 2")
    prompts = prompts_of(5, 13)
    config = EngineConfig(max_batch_tokens=32, chunk_tokens=12, mixed_tokens=12, max_running=4)
    loop = EngineLoop(fused(load_runner(folder)), config)

    answers = loop.generate(prompts, SamplingParams(temperature=0, max_tokens=6))

    assert [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)] == [
        greedy_reference(reference, prompt, 6) for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("counts", "choices", "by_kernel"),
    [((1, 11), VENDOR, 0), ((1, 11), UNMEASURED, 3), ((9, 11), VENDOR, 3)],
    ids=["the only prompt", "measured as slower", "one of two"],
)
def test_the_vendors_attention_computes_a_prompt_that_is_alone_and_short(
    family_model: Families,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int, int],
    choices: Choices,
    by_kernel: int,
) -> None:
    folder, reference = family_model("qwen2")
    runner, free, calls = fused(load_runner(folder), choices), shuffled_blocks(), []
    prompts = prompts_of(*counts)

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        prefill_attention(*args, **kwargs)

    monkeypatch.setattr("engine.model.fused_pass.prefill_attention", counted)
    requests = [scattered(prompt, free) for prompt in prompts]
    computed = logits_of(runner, list(zip(requests, counts, strict=True)))

    for prompt, logits in zip(prompts, computed, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, prompt), **TOLERANCE)
    assert len(calls) == by_kernel, "of three layers"


def test_half_precision_is_as_close_to_fp32_as_the_plain_pass(family_model: Families) -> None:
    # float16, because the interpreter multiplies matrices of bfloat16 as if they were integers.
    dtype = torch.float16
    folder, reference = family_model("gemma3")
    (prompt,) = prompts_of(17)
    expected = reference_logits(reference, prompt)
    errors = []
    for runner in (load_runner(folder, dtype=dtype), fused(load_runner(folder, dtype=dtype))):
        (logits,) = logits_of(runner, [(scattered(prompt, shuffled_blocks()), 17)])
        errors.append((logits - expected).square().mean().sqrt().item())

    plain_error, fused_error = errors
    assert 0 < fused_error < 1.5 * plain_error


def streams_of(runner: ModelRunner, batch: ForwardBatch) -> tuple[list[torch.Tensor], list[int]]:
    """The residual stream behind the embedding and each layer, and which layers were said to be stored."""
    streams: list[torch.Tensor] = []
    stored: list[int] = []
    inputs = runner.model.prepare(batch, 4)
    runner.model.forward(
        inputs, runner.cache, watch=lambda _, hidden: streams.append(hidden.clone()), stored=stored.append
    )
    return streams, stored


def test_layers_are_told_of_in_their_order_and_watched_like_those_of_the_plain_pass(
    family_model: Families,
) -> None:
    folder, _ = family_model("gemma3")
    (prompt,) = prompts_of(11)
    chunk = Chunk.of(scattered(prompt, shuffled_blocks()), 11)
    batch = with_all_logits(build_batch(1, [chunk], 4))

    plain, plain_stored = streams_of(load_runner(folder), batch)
    with_kernels, stored = streams_of(fused(load_runner(folder)), batch)

    assert stored == plain_stored == [1, 2, 3]
    assert len(with_kernels) == len(plain) == 4
    for ours, theirs in zip(with_kernels, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_the_caches_are_equal(family_model: Families) -> None:
    folder, _ = family_model("qwen3 head_dim 80 of hidden 60")
    (prompt,) = prompts_of(19)
    caches: list[KVCache] = []
    for runner in (load_runner(folder), fused(load_runner(folder))):
        logits_of(runner, [(scattered(prompt, shuffled_blocks()), 19)])
        caches.append(runner.cache)

    torch.testing.assert_close(caches[0].data, caches[1].data, rtol=1e-5, atol=1e-5, equal_nan=True)


def kv_of(blocks_N2Kbh: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """What blocks have of a sequence's tokens, from their first slot on: [T, 2, K, h]."""
    return blocks_N2Kbh.permute(0, 3, 1, 2, 4).flatten(0, 1)[:num_tokens]


def completing(request: Request) -> list[Chunk]:
    return [Chunk.of(request, request.num_pending_tokens)]


@pytest.mark.parametrize(
    ("layout", "dtype", "choices"),
    [("HND", torch.float32, VENDOR), ("NHD", torch.float16, UNMEASURED)],
    ids=["HND-vendor", "NHD-half"],
)
def test_the_stage_holds_what_the_cache_does_of_prompts_that_end(
    family_model: Families, layout: str, dtype: torch.dtype, choices: Choices
) -> None:
    folder, _ = family_model("qwen2")
    runner = fused(load_runner(folder, layout=layout, dtype=dtype), choices)
    runner.stage(16)
    # The first one's last chunk begins within its third block.
    prompts, free = prompts_of(19, 7, 9, 9), shuffled_blocks()
    ends, decodes, short, goes_on = requests = [scattered(prompt, free) for prompt in prompts]
    logits_of(runner, [(ends, 10), (decodes, 6)])
    batch = build_batch(2, [Chunk.of(r, n) for r, n in zip(requests, (9, 1, 9, 4), strict=True)], 4)
    expected = runner.logits(batch)
    blocks, offsets = (torch.from_numpy(array) for array in divmod(batch.slot_mapping, 4))
    cached = runner.cache.logical[blocks, :, :, :, offsets].clone()
    runner.cache.logical[blocks, :, :, :, offsets] = torch.nan
    heard: list[tuple[int, Stored]] = []

    logits = runner.logits(batch, lambda *news: heard.append(news))

    assert torch.equal(logits, expected)
    assert torch.equal(runner.cache.logical[blocks, :, :, :, offsets], cached)
    staged = heard[0][1].staged
    assert staged is not None
    assert heard == [(layer, Stored(None, staged)) for layer in (1, 2, 3)]
    for request, num_before in ((ends, 3), (short, 0)):
        ids = request.block_ids[num_before:]
        at, num_tokens = staged.find(ids), request.num_tokens - 4 * num_before
        assert at is not None
        for index in range(3):
            kv_T2Kh = kv_of(runner.cache.layer(index)[ids], num_tokens)
            assert not bool(kv_T2Kh.isnan().any())
            assert torch.equal(kv_of(staged.layers_Ln2Kbh[index][at], num_tokens), kv_T2Kh)
    assert [staged.find([r.block_ids[-1]]) for r in (decodes, goes_on)] == [None, None]
    assert staged.is_intact


def test_the_stage_is_taken_again_by_the_next_prompt_but_one_that_is_watched(family_model: Families) -> None:
    folder, _ = family_model("qwen2")
    runner, free = fused(load_runner(folder)), shuffled_blocks()
    runner.stage(9)
    heard: list[Stored] = []

    def run(*, watched: bool) -> None:
        batch = build_batch(1, completing(scattered(prompts_of(9)[0], free)), 4)
        runner.run(batch, (lambda _, stored: heard.append(stored)) if watched else None)

    run(watched=True)
    (first,) = {stored.staged for stored in heard}
    assert first is not None
    before = first.layers_Ln2Kbh.clone()
    run(watched=False)
    run(watched=True)
    assert first.is_intact
    assert torch.equal(first.layers_Ln2Kbh, before)
    run(watched=True)
    assert not first.is_intact


def test_without_kernels_nothing_is_staged(family_model: Families) -> None:
    folder, _ = family_model("qwen2")
    runner = load_runner(folder)
    runner.stage(64)
    heard: list[Stored] = []

    runner.run(
        build_batch(1, completing(scattered(prompts_of(20)[0], shuffled_blocks())), 4),
        lambda _, stored: heard.append(stored),
    )

    assert heard == [DONE] * 3
    assert (runner.kernel_choices, fused(runner).kernel_choices) == (None, UNMEASURED)
