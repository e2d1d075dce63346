"""Workers that come and go while requests run: none of them fails, and the answers stay the same."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.v1 import pool_service_pb2

PROMPTS = ("one prompt", "a rather longer prompt than the other one", "short")
START_S = 60.0


class Load:
    """Requests one after the other, on a few connections; each answer is compared with the first ones."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._expected: dict[str, list[int]] = {}
        self.num_answers = 0

    async def learn(self) -> None:
        self._expected = {prompt: await self.ask(prompt) for prompt in PROMPTS}

    async def ask(self, prompt: str) -> list[int]:
        (answer,) = await self._client.generate(prompt, max_tokens=24, temperature=0.0).answers()
        return list(answer.token_ids)

    async def repeat(self, prompt: str) -> None:
        while True:
            assert await self.ask(prompt) == self._expected[prompt]
            self.num_answers += 1

    async def more(self, number: int) -> None:
        """Returns when so many more answers have come."""
        enough = self.num_answers + number
        await until(lambda: self.num_answers >= enough)


@asynccontextmanager
async def load(client: AsyncClient) -> AsyncIterator[Load]:
    running = Load(client)
    await running.learn()
    tasks = [asyncio.create_task(running.repeat(prompt)) for prompt in PROMPTS]
    try:
        yield running
        # A request that failed, or an answer that differed.
        assert [task.exception() for task in tasks if task.done()] == []
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.02)


async def baton(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.cli.main", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@pytest.mark.asyncio(loop_scope="session")
async def test_workers_come_and_go_under_load(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    before = tiny_cluster.pids
    async with load(tiny_client) as running:
        # Both at once: they load their models at the same time.
        assert list((await tiny_cluster.scale("prefill", 2)).added) == ["prefill-1"]
        assert list((await tiny_cluster.scale("decode", 3)).added) == ["decode-1", "decode-2"]
        status = await tiny_cluster.wait_ready(START_S)
        ready = {worker.name for worker in status.workers if worker.state == "ready"}
        assert ready >= {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
        await running.more(10)

        # A rolling restart of one of two.
        old = tiny_cluster.pids["prefill-1"]
        os.kill(old, signal.SIGTERM)
        await until(lambda: tiny_cluster.pids.get("prefill-1", old) != old)
        await tiny_cluster.wait_ready(START_S)

        assert list((await tiny_cluster.scale("decode", 2)).removed) == ["decode-2"]
        await until(lambda: "decode-2" not in tiny_cluster.pids)
        told = await baton("drain", "decode-1", "--address", tiny_cluster.control_address)
        assert "1 other decode worker serving" in told
        assert told.endswith("decode-1 is gone\n")
        assert list((await tiny_cluster.scale("prefill", 1)).removed) == ["prefill-1"]
        await until(lambda: "prefill-1" not in tiny_cluster.pids)
        await running.more(10)
    await tiny_cluster.wait_ready(START_S)
    assert tiny_cluster.pids == before
    serving = pool_service_pb2.POOL_WORKER_STATE_SERVING
    workers = (await tiny_cluster.workers()).workers
    assert [(worker.name, worker.state) for worker in workers] == [
        ("decode-0", serving),
        ("prefill-0", serving),
    ]
