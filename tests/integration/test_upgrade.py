"""The way of an upgrade (docs/deployment.md), step by step, while requests run: none fails, none differs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.redis_server import EmbeddedRedis
from tests.integration.plain_cluster import PlainCluster, plain_cluster
from tests.integration.test_scale import Load, load

GRACE_S = 20.0


async def replaced(cluster: PlainCluster, running: Load, old: str, new: str) -> None:
    """The new one serves before the old one is told to go; the old one ends in order."""
    await cluster.start(new)
    await cluster.wait_ready(new)
    await running.more(3)
    leaving = cluster.processes.pop(old)
    os.kill(leaving.pid, signal.SIGTERM)
    async with asyncio.timeout(GRACE_S):
        status, _ = await leaving.wait()
    assert status == 0, old
    await running.more(6)
    assert old not in await cluster.ready()


async def test_routers_roll(tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    async with EmbeddedRedis() as redis, plain_cluster(tiny_model[0], tmp_path, redis.url) as cluster:
        for name in ("router-0", "router-1", "prefill-0", "decode-0"):
            await cluster.start(name)
        for router in cluster.doors:
            await cluster.wait_ready("prefill-0", "decode-0", router=router)
        async with await AsyncClient.connect(list(cluster.doors.values())) as client, load(client) as running:
            await running.more(6)
            for router in cluster.doors:
                leaving = cluster.processes.pop(router)
                os.kill(leaving.pid, signal.SIGTERM)
                # The other one answers meanwhile.
                await running.more(6)
                async with asyncio.timeout(GRACE_S):
                    status, _ = await leaving.wait()
                assert status == 0, router
                await cluster.start(router)
                await cluster.wait_ready("prefill-0", "decode-0", router=router)
            await running.more(6)


async def test_prefill_rolls_and_decode_moves_to_a_second_group(
    tiny_model: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    async with EmbeddedRedis() as redis, plain_cluster(tiny_model[0], tmp_path, redis.url) as cluster:
        for name in ("router-0", "prefill-0", "decode-0"):
            await cluster.start(name)
        await cluster.wait_ready("prefill-0", "decode-0")
        async with await AsyncClient.connect(cluster.address) as client, load(client) as running:
            await running.more(6)
            await replaced(cluster, running, "prefill-0", "prefill-1")
            await replaced(cluster, running, "decode-0", "decode-1")
            assert running.num_answers >= 24
        assert not [event for event in cluster.events("router-0") if event["event"] == "attempt failed"]
