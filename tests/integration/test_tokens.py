"""Disaggregated tokens == single-process tokens == transformers' tokens, on the real model in fp32."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from baton import AsyncClient
from baton.models import ModelDir
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.load import load_engine
from engine.loop import EngineLoop
from tests.integration.oracle import assert_greedy, greedy
from tests.integration.prompts import BLOCK, LENGTHS, prompts

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def reference(real_model: ModelDir) -> LlamaForCausalLM:
    """transformers' model."""
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(real_model.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def all_prompts(real_model: ModelDir) -> list[list[int]]:
    """The twenty prompts."""
    return prompts(Tokenizer.from_file(str(real_model.tokenizer_path)))


def test_the_prompts_cover_block_borders() -> None:
    assert {BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1} <= set(LENGTHS)
    assert len(LENGTHS) == 20
    assert (min(LENGTHS), max(LENGTHS)) == (1, 1500)


@pytest.mark.timeout(600)
def test_the_oracle_is_generate(reference: LlamaForCausalLM, all_prompts: list[list[int]]) -> None:
    for prompt in all_prompts[:2]:
        tokens = greedy(reference, [prompt], NUM_TOKENS)[0]
        assert_greedy(reference, prompt, tokens)
        with pytest.raises(AssertionError):
            assert_greedy(reference, prompt, [*tokens[:40], tokens[40] + 1, *tokens[41:]])


@pytest.mark.timeout(600)
def test_one_process_equals_transformers(
    real_model: ModelDir,
    reference: LlamaForCausalLM,
    all_prompts: list[list[int]],
) -> None:
    config = EngineConfig(dtype="float32", threads=2, kv_cache_bytes=1 << 30)
    engine = EngineLoop(load_engine(config, real_model), config)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = engine.generate(all_prompts, params)
    for prompt, tokens in zip(all_prompts, found, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert_greedy(reference, prompt, tokens)


@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="session")
async def test_disaggregated_equals_transformers(
    real_client: AsyncClient,
    reference: LlamaForCausalLM,
    all_prompts: list[list[int]],
) -> None:
    async def answer(prompt: list[int]) -> list[int]:
        generation = real_client.generate(
            token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, timeout_s=150
        )
        return [token_id async for chunk in generation for token_id in chunk.token_ids]

    found = await asyncio.gather(*map(answer, all_prompts))
    for prompt, tokens in zip(all_prompts, found, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert_greedy(reference, prompt, tokens)
