"""Health under load, and SIGTERM in the middle of streams: nothing fails, nothing is cut off, status 0.

The worker that leaves is a second decode worker beside the cluster's own; it is this module's child, so
that its exit status is seen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import LlamaForCausalLM

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.drain import LEAVE_S
from baton.rpc import open_channel
from tests.integration.oracle import assert_greedy

TinyModel = tuple[Path, LlamaForCausalLM]

SPARE = "decode-spare"
GUARD_S = 60.0
NUM_STREAMS = 12
# Until the router has given the new worker some of them.
NUM_ROUNDS = 5
PROBE_TIMEOUT_S = 2.0
# Beyond grace and leave times: closing, on a machine that is busy.
CLOSE_S = 10.0


@asynccontextmanager
async def spare(cluster: LocalCluster, *, drain_s: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """One more decode worker of the cluster, which has a grace time of its own."""
    config = cluster.config
    settings = {
        "name": SPARE,
        "model": config.model,
        "namespace": config.namespace,
        "dtype": config.dtype,
        "kv-cache-bytes": config.kv_cache_bytes,
        "drain-s": drain_s,
        "log-file": cluster.places.logs / f"{SPARE}.log",
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    # The address has a password in it, and everybody can read a command line.
    environment = {**os.environ, "BATON_DECODE_REDIS_URL": cluster.places.redis_url}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "decode_worker", *flags, env=environment
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def wait_for_spare(cluster: LocalCluster, *, num_attempts: int) -> None:
    """Until KV can go to the spare worker, and it has that many attempts."""
    async with asyncio.timeout(GUARD_S):
        while True:
            workers = (await cluster.status()).workers
            paired = any(pair.worker == SPARE and pair.transport for w in workers for pair in w.pairs)
            spare_has = [w.num_attempts for w in workers if w.name == SPARE and w.state == "ready"]
            if paired and spare_has and spare_has[0] >= num_attempts:
                return
            await asyncio.sleep(0.02)


async def streams(client: AsyncClient, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    async def answer(prompt: list[int]) -> list[int]:
        generation = client.generate(token_ids=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True)
        return [token_id async for chunk in generation for token_id in chunk.token_ids]

    return await asyncio.gather(*map(answer, prompts))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("drain_s", "num_tokens"), [(60.0, 300), (0.2, 800)], ids=["within-the-grace", "handed-over"]
)
async def test_sigterm_of_a_decode_worker_fails_no_stream(
    tiny_cluster: LocalCluster,
    tiny_client: AsyncClient,
    tiny_model: TinyModel,
    drain_s: float,
    num_tokens: int,
) -> None:
    async with spare(tiny_cluster, drain_s=drain_s) as child, asyncio.timeout(GUARD_S):
        await wait_for_spare(tiny_cluster, num_attempts=0)
        for round_number in range(NUM_ROUNDS):
            # Nobody has these in its prefix cache, so that both decode workers get some of them.
            prompts = [
                [num_tokens % 256, 3 + index, 3 + round_number, *range(20, 40)]
                for index in range(NUM_STREAMS)
            ]
            running = asyncio.create_task(streams(tiny_client, prompts, num_tokens))
            serving = asyncio.create_task(wait_for_spare(tiny_cluster, num_attempts=1))
            await asyncio.wait((running, serving), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                break
            serving.cancel()
        assert not running.done(), "the spare worker must be struck while it decodes"
        os.kill(child.pid, signal.SIGTERM)
        told_at = asyncio.get_running_loop().time()
        assert await child.wait() == 0
        assert asyncio.get_running_loop().time() - told_at < drain_s + LEAVE_S + CLOSE_S
        answers = await running
    assert [len(answer) for answer in answers] == [num_tokens] * NUM_STREAMS
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(tiny_model[1], prompt, answer)


async def probe(address: str, service: str, statuses: set[int]) -> None:
    """Asks for health for ever; raises once an answer takes longer than a probe waits."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            request = health_pb2.HealthCheckRequest(service=service)
            statuses.add((await stub.Check(request, timeout=PROBE_TIMEOUT_S)).status)
            await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="session")
async def test_busy_workers_answer_every_probe(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    status = await tiny_cluster.wait_ready(GUARD_S)
    seen: dict[tuple[str, str], set[int]] = {
        (worker.address, service): set()
        for worker in status.workers
        if worker.state == "ready"
        for service in ("", "readiness", "liveness")
    }
    assert len(seen) >= 6
    async with asyncio.timeout(GUARD_S):
        probes = [asyncio.create_task(probe(*asked, statuses)) for asked, statuses in seen.items()]
        prompts = [[3 + index] * 1900 for index in range(24)]
        load = asyncio.create_task(streams(tiny_client, prompts, 100))
        await asyncio.wait((load, *probes), return_when=asyncio.FIRST_COMPLETED)
        failed = [task.exception() for task in probes if task.done()]
        for task in probes:
            task.cancel()
        await asyncio.wait(probes)
        # A request that was refused would be no load.
        answers = await load
    assert failed == []
    assert [len(answer) for answer in answers] == [100] * len(prompts)
    assert set(map(frozenset, seen.values())) == {frozenset({health_pb2.HealthCheckResponse.SERVING})}
