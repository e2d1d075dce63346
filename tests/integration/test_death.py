"""SIGKILL of either worker under load: every request ends in time, and the worker comes back.

The last module that uses the real cluster, because it leaves it with new workers.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from baton import AsyncClient, Retry
from baton.cluster.local_cluster import LocalCluster
from baton.errors import BatonError
from tests.integration.ledgers import ledgers, settled

CONCURRENCY = 6
ENDS_WITHIN_S = 3.0
BACK_WITHIN_S = 60.0


class Load:
    """Requests that keep coming until stopped; every end is kept with its time and its error."""

    def __init__(self, client: AsyncClient) -> None:
        self.ends: list[tuple[float, float, BatonError | None]] = []
        self._client = client
        self._stopped = False
        self.first_token = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(CONCURRENCY):
                group.create_task(self._client_loop(index))

    def stop(self) -> None:
        self._stopped = True

    async def _client_loop(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopped:
            started, error = loop.time(), None
            try:
                prompt = [504 + index] * (20 + 60 * index)
                async for _ in self._client.generate(
                    token_ids=prompt, max_tokens=12, temperature=0, ignore_eos=True
                ):
                    self.first_token.set()
            except BatonError as failed:
                error = failed
            self.ends.append((started, loop.time(), error))
            if error is not None:
                await asyncio.sleep(0.1)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("role", ["prefill-0", "decode-0"])
async def test_a_worker_is_killed(real_cluster: LocalCluster, role: str) -> None:
    status = await real_cluster.wait_ready(BACK_WITHIN_S)
    before = await ledgers(real_cluster)
    victim = next(worker for worker in status.workers if worker.name == role)
    # What the cluster does by itself: such a client does not ask again.
    async with await AsyncClient.connect(real_cluster.address, retry=Retry(max_attempts=1)) as client:
        load = Load(client)
        running = asyncio.create_task(load.run())
        await load.first_token.wait()
        killed_at = asyncio.get_running_loop().time()
        os.kill(victim.pid, signal.SIGKILL)
        await asyncio.sleep(ENDS_WITHIN_S + 0.5)
        load.stop()
        async with asyncio.timeout(BACK_WITHIN_S):
            await running

    struck = [end for end in load.ends if end[0] < killed_at < end[1]]
    assert struck, "the kill must strike running requests, or it proves nothing"
    assert all(end[1] - killed_at <= ENDS_WITHIN_S for end in struck)
    failures = [error for _, _, error in load.ends if error is not None]
    assert failures
    assert all(error.retryable for error in failures), [error.code for error in failures]

    after = await real_cluster.wait_ready(BACK_WITHIN_S)
    back = next(worker for worker in after.workers if worker.name == role)
    assert back.pid != victim.pid
    async with await AsyncClient.connect(real_cluster.address) as client:
        (answer,) = await client.generate("Once upon a time", max_tokens=8, ignore_eos=True).answers()
    assert len(answer.token_ids) == 8
    assert await settled(real_cluster, before, within_s=2.0) == before
