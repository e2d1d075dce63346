"""Five minutes of mixed load with cancels: nothing leaks, memory stays flat."""

from __future__ import annotations

import asyncio
import random

import psutil
import pytest

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.errors import BatonError
from tests.integration.ledgers import ledgers, settled

DURATION_S = 300.0
CONCURRENCY = 12
MAX_SLOPE_BYTES_PER_MIN = 1 << 20


async def mixed_load(client: AsyncClient, seed: int, until: float) -> int:
    """One client that asks, now and then leaves early, and asks again; returns how many answers it read."""
    rng = random.Random(seed)
    finished = 0
    while asyncio.get_running_loop().time() < until:
        prompt = [rng.randrange(3, 259) for _ in range(rng.choice((4, 30, 140, 600)))]
        leaves_after = rng.choice((None, None, None, 0, 3))
        generation = client.generate(token_ids=prompt, max_tokens=rng.randrange(1, 60), ignore_eos=True)
        seen = 0
        async for chunk in generation:
            seen += len(chunk.token_ids)
            if leaves_after is not None and seen > leaves_after:
                break
        else:
            finished += 1
        generation.cancel()
    return finished


@pytest.mark.long
@pytest.mark.timeout(DURATION_S + 120)
@pytest.mark.asyncio(loop_scope="session")
async def test_soak(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    before = await ledgers(tiny_cluster)
    pids = [*tiny_cluster.pids.values()]
    loop = asyncio.get_running_loop()
    until = loop.time() + DURATION_S
    load = [asyncio.create_task(mixed_load(tiny_client, seed, until)) for seed in range(CONCURRENCY)]
    await asyncio.sleep(DURATION_S / 2)
    half = {pid: psutil.Process(pid).memory_info().rss for pid in pids}
    descriptors = {pid: psutil.Process(pid).num_fds() for pid in pids}
    try:
        answers = await asyncio.gather(*load)
    except BatonError as error:
        pytest.fail(f"a request failed: {error.code} {error.message}")
    assert min(answers) > 0
    assert await settled(tiny_cluster, before, within_s=2.0) == before
    grown = {pid: psutil.Process(pid).memory_info().rss - half[pid] for pid in pids}
    minutes = DURATION_S / 2 / 60
    assert all(growth <= MAX_SLOPE_BYTES_PER_MIN * minutes for growth in grown.values()), grown
    assert all(psutil.Process(pid).num_fds() <= descriptors[pid] + 4 for pid in pids)
