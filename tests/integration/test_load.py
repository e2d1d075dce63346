"""Two hundred requests of mixed length, thirty-two at a time: nothing mixes, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import LlamaForCausalLM

from baton import AsyncClient, Retry
from baton.cluster.local_cluster import LocalCluster
from baton.errors import BatonError, Overloaded
from tests.integration.ledgers import ledgers, settled
from tests.integration.oracle import assert_greedy
from tests.integration.test_cancel_statuses import STOPPED_AT_MOST_S, stopped

NUM_REQUESTS = 200
CONCURRENCY = 32


def mixed_prompts(seed: int) -> list[tuple[list[int], int]]:
    """Random prompts, mostly short, some over several chunks; each with a number of tokens to generate."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 5, 16, 40, 90, 130, 300, 700)) for _ in range(NUM_REQUESTS)]
    return [([rng.randrange(3, 259) for _ in range(n)], rng.randrange(2, 20)) for n in lengths]


@pytest.mark.asyncio(loop_scope="session")
async def test_every_answer_is_that_of_its_prompt_alone(
    tiny_cluster: LocalCluster, tiny_client: AsyncClient, tiny_model: tuple[Path, LlamaForCausalLM]
) -> None:
    before = await ledgers(tiny_cluster)
    slots = asyncio.Semaphore(CONCURRENCY)

    async def answer(prompt: list[int], num_tokens: int) -> list[int]:
        async with slots:
            generation = tiny_client.generate(
                token_ids=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True, timeout_s=120
            )
            return [token_id async for chunk in generation for token_id in chunk.token_ids]

    requests = mixed_prompts(seed=1)
    found = await asyncio.gather(*(answer(*request) for request in requests))
    assert await settled(tiny_cluster, before, within_s=1.0) == before
    model = tiny_model[1]
    for (prompt, num_tokens), tokens in zip(requests, found, strict=True):
        assert len(tokens) == num_tokens
        assert_greedy(model, prompt, tokens)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_seed_gives_the_same_tokens_in_any_company(tiny_client: AsyncClient) -> None:
    async def answer(seed: int) -> list[int]:
        generation = tiny_client.generate(
            token_ids=[9, 8, 7], max_tokens=12, temperature=0.9, seed=seed, ignore_eos=True
        )
        return [token_id async for chunk in generation for token_id in chunk.token_ids]

    alone = [await answer(seed) for seed in range(4)]
    together = await asyncio.gather(*(answer(seed) for seed in range(4)))
    assert list(together) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


@pytest_asyncio.fixture(loop_scope="session")
async def client_that_asks_once(tiny_cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(tiny_cluster.address, retry=Retry(max_attempts=1)) as client:
        yield client


@pytest.mark.asyncio(loop_scope="session")
async def test_a_full_queue_refuses_and_says_when_to_come_back(
    tiny_cluster: LocalCluster, client_that_asks_once: AsyncClient
) -> None:
    before = await ledgers(tiny_cluster)
    is_refused = asyncio.Event()

    async def answer(index: int) -> BatonError | None:
        # All of them different, because what a worker has cached of a prompt costs none of its credit.
        prompt = [3 + index % 250, 3 + index // 250] * 75
        try:
            await client_that_asks_once.generate(token_ids=prompt, max_tokens=4, ignore_eos=True).text()
        except BatonError as error:
            is_refused.set()
            return error
        return None

    answers = [asyncio.create_task(answer(index)) for index in range(400)]
    # A worker that does not read holds as many as fit into its credit, however fast it is.
    with stopped(tiny_cluster, "prefill-0"):
        async with asyncio.timeout(STOPPED_AT_MOST_S):
            await is_refused.wait()
    outcomes = await asyncio.gather(*answers)
    refused = [error for error in outcomes if error is not None]
    assert all(isinstance(error, Overloaded) and error.retry_after_s for error in refused)
    assert 0 < len(refused) < 400 - 256
    assert await settled(tiny_cluster, before, within_s=2.0) == before
