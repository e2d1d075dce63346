"""Cancel and deadline at every stage: both legs give everything back within a second."""

from __future__ import annotations

import asyncio

import pytest

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.errors import DeadlineExceeded
from tests.integration.ledgers import ledgers, settled


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("num_seen", [0, 1, 5, 60], ids=["queued", "first-token", "decoding", "late"])
async def test_cancel(tiny_cluster: LocalCluster, tiny_client: AsyncClient, num_seen: int) -> None:
    before = await ledgers(tiny_cluster)
    generation = tiny_client.generate(
        token_ids=[7] * 600, max_tokens=1200, temperature=0, ignore_eos=True, timeout_s=60
    )
    seen = 0
    if num_seen:
        async for chunk in generation:
            seen += len(chunk.token_ids)
            if seen >= num_seen:
                break
    generation.cancel()
    assert seen >= num_seen
    assert await settled(tiny_cluster, before, within_s=1.0) == before


@pytest.mark.asyncio(loop_scope="session")
async def test_a_storm_of_cancels(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    before = await ledgers(tiny_cluster)

    async def impatient(index: int) -> None:
        generation = tiny_client.generate(token_ids=[index + 3] * 200, max_tokens=800, ignore_eos=True)
        try:
            async with asyncio.timeout(0.02 * (1 + index % 10)):
                async for _ in generation:
                    pass
        except TimeoutError:
            generation.cancel()

    await asyncio.gather(*map(impatient, range(60)))
    assert await settled(tiny_cluster, before, within_s=1.0) == before
    answer = [c async for c in tiny_client.generate(token_ids=[5, 6], max_tokens=3, ignore_eos=True)]
    assert sum(len(chunk.token_ids) for chunk in answer) == 3


@pytest.mark.asyncio(loop_scope="session")
async def test_a_deadline_on_a_long_prompt(real_cluster: LocalCluster, real_client: AsyncClient) -> None:
    before = await ledgers(real_cluster)
    with pytest.raises(DeadlineExceeded):
        await real_client.generate(token_ids=[504] * 1500, max_tokens=64, timeout_s=0.1).text()
    # Its blocks are fenced until the step under way has ended, which takes seconds on busy cores.
    assert await settled(real_cluster, before, within_s=10.0) == before


@pytest.mark.asyncio(loop_scope="session")
async def test_a_deadline_while_decoding(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    before = await ledgers(tiny_cluster)
    generation = tiny_client.generate(token_ids=[5] * 10, max_tokens=1900, ignore_eos=True, timeout_s=0.4)
    seen: list[int] = []

    async def read() -> None:
        async for chunk in generation:
            seen.extend(chunk.token_ids)

    with pytest.raises(DeadlineExceeded):
        await read()
    assert seen
    assert await settled(tiny_cluster, before, within_s=1.0) == before
