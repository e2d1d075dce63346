"""Redis hangs, dies and comes back empty under a cluster of real processes that goes on serving."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.redis_server import EmbeddedRedis
from baton.registry import ANNOUNCED_S
from tests.integration.oracle import assert_greedy
from tests.integration.plain_cluster import PlainCluster, plain_cluster

WORKERS = ("prefill-0", "decode-0")
# What is promised, and what a slow machine may add: model and connections are not Redis's.
RECONVERGED_S = 10.0
SLOW_S = 10.0
PROMPT = [5, 6, 7, 8]


class Load:
    """Two clients that ask again and again; every answer is checked at the end."""

    def __init__(self, client: AsyncClient) -> None:
        self.answers: list[list[int]] = []
        self._client = client

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        asking = [asyncio.create_task(self._ask()) for _ in range(2)]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
            done = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in done), done

    async def goes_on(self) -> None:
        """Waits for answers to questions that are not asked yet."""
        expected = len(self.answers) + 4
        async with asyncio.timeout(20):
            while len(self.answers) < expected:
                await asyncio.sleep(0.02)

    async def _ask(self) -> None:
        while True:
            generation = self._client.generate(
                token_ids=PROMPT, max_tokens=24, temperature=0, ignore_eos=True, timeout_s=20
            )
            self.answers.append([token async for chunk in generation for token in chunk.token_ids])


async def outage(redis: EmbeddedRedis, cluster: PlainCluster, load: Load) -> None:
    """It hangs while a worker starts, and is killed before it has answered anybody."""
    os.kill(redis.pid, signal.SIGSTOP)
    # Longer than any announcement lives.
    ended = asyncio.create_task(asyncio.sleep(ANNOUNCED_S + 1))
    await cluster.start("decode-1")
    async with asyncio.timeout(60):
        while not any(event["event"] == "announcement failed" for event in cluster.events("decode-1")):
            await load.goes_on()
    await ended
    assert await cluster.ready() == set(WORKERS)
    os.kill(redis.pid, signal.SIGKILL)
    await load.goes_on()


async def reconverges(cluster: PlainCluster, redis: EmbeddedRedis) -> None:
    """All are announced, and the worker that began without Redis takes requests."""
    async with Redis.from_url(redis.url) as client, asyncio.timeout(RECONVERGED_S + SLOW_S):
        while await client.dbsize() < 3:
            await asyncio.sleep(0.05)
        await cluster.wait_ready(*WORKERS, "decode-1")


async def poison(cluster: PlainCluster, redis: EmbeddedRedis) -> None:
    """Whatever may stand under our prefix; returns once the router has read all of it."""
    values = {
        "baton:worker:0": b"\xff" * 100_000,
        "baton:worker:0000000000000001": b"[" * 2_000,
        "baton:worker:0000000000000002": json.dumps({"name": "decode-0", "address": "evil"}).encode(),
        "baton:worker:0000000000000003": b"{}",
    }
    async with Redis.from_url(redis.url) as client:
        for key, value in values.items():
            await client.set(key, value)
        await client.hset("baton:worker:hash", "decode-0", "x")
    async with asyncio.timeout(10):
        while len(ignored(cluster)) < len(values) + 1:
            await asyncio.sleep(0.05)


def ignored(cluster: PlainCluster) -> set[str]:
    return {e["key"] for e in cluster.events("router-0") if e["event"] == "registry entry ignored"}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_cluster_without_redis_serves_and_finds_newcomers_once_it_is_back(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    async with EmbeddedRedis() as redis, plain_cluster(tiny_model[0], tmp_path, redis.url) as cluster:
        for name in ("router-0", *WORKERS):
            await cluster.start(name)
        await cluster.wait_ready(*WORKERS)
        async with await AsyncClient.connect(cluster.address) as client:
            load = Load(client)
            async with load.running():
                await load.goes_on()
                await outage(redis, cluster, load)
                async with EmbeddedRedis(port=redis.port, password=redis.password) as empty:
                    await reconverges(cluster, empty)
                    await poison(cluster, empty)
                    await load.goes_on()
                    assert await cluster.ready() == {*WORKERS, "decode-1"}
    assert len(load.answers) >= 20
    for answer in {tuple(answer) for answer in load.answers}:
        assert_greedy(tiny_model[1], PROMPT, answer)
