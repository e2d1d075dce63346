"""SIGKILL of the router in mid-answer: the SDK goes on when it is back, with exactly its tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from tests.integration.ledgers import ledgers, settled
from tests.integration.oracle import assert_greedy

NUM_TOKENS = 600


@pytest.mark.asyncio(loop_scope="session")
async def test_answers_survive_their_router(
    tiny_cluster: LocalCluster, tiny_client: AsyncClient, tiny_model: tuple[Path, LlamaForCausalLM]
) -> None:
    before = await ledgers(tiny_cluster)
    prompts = [[5 + index] * (10 + index) for index in range(4)]
    begun = asyncio.Event()

    async def answer(prompt: list[int]) -> tuple[list[int], str]:
        generation = tiny_client.generate(
            token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, timeout_s=60
        )
        tokens: list[int] = []
        texts: list[str] = []
        async for chunk in generation:
            tokens += chunk.token_ids
            texts.append(chunk.text)
            if len(tokens) > 20:
                begun.set()
        assert generation.summary.num_output_tokens == NUM_TOKENS
        return tokens, "".join(texts)

    answers = [asyncio.create_task(answer(prompt)) for prompt in prompts]
    await begun.wait()
    os.kill(tiny_cluster.pids["router-0"], signal.SIGKILL)
    struck = [task for task in answers if not task.done()]
    assert struck, "the kill must strike running answers, or it proves nothing"
    found = await asyncio.gather(*answers)
    for prompt, (tokens, _) in zip(prompts, found, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert_greedy(tiny_model[1], prompt, tokens)
    # The text of a resumed answer is that of an undisturbed one.
    assert [await answer(prompt) for prompt in prompts] == list(found)
    await tiny_cluster.wait_ready(20.0)
    assert await settled(tiny_cluster, before, within_s=2.0) == before
