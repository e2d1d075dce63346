"""Cancel at each status of a request, fifty times each: nothing is left behind.

A request is held at its status by stopping the worker that would take it further, for less than the
silence that ends a session; what a ledger shows proves that all of them are there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import pytest_asyncio

from baton import AsyncClient
from baton.cluster.local_cluster import LocalCluster
from baton.generation import Generation
from baton.rpc import open_channel
from baton.v1.admin_service_pb2 import GetLedgerRequest
from baton.v1.admin_service_pb2_grpc import AdminServiceStub
from tests.integration.ledgers import Ledgers, ledgers, settled

TIMES = 50
# Two of these fit into a prefill worker's credit of 4,096 tokens, and take it several steps each.
NUM_LONG = 1500
NUM_FITTING = 2
NUMBERS = itertools.count()
# Fifty of these fit into the credit at once.
SHORT = [9] * 80
# Tokens of an answer that is not over before it is cancelled.
MANY = 1000
# A session ends after 2 s of silence.
STOPPED_AT_MOST_S = 1.8

Held = Callable[[], Awaitable[dict[str, int]]]


@pytest_asyncio.fixture(loop_scope="session")
async def before(tiny_cluster: LocalCluster) -> AsyncIterator[Ledgers]:
    """The ledgers of an idle cluster, which must be the same after the test."""
    await tiny_cluster.wait_ready(20.0)
    idle = await ledgers(tiny_cluster)
    yield idle
    assert await settled(tiny_cluster, idle, within_s=2.0) == idle


def long() -> list[int]:
    """A prompt that no other begins like: what is cached costs no credit, and takes no steps."""
    first, second = divmod(next(NUMBERS), 200)
    return [11 + first, 11 + second, *[7] * (NUM_LONG - 2)]


def ask(client: AsyncClient, prompt: list[int]) -> Generation:
    """Starts an answer that would go on for longer than any of these tests."""
    max_tokens = MANY if prompt is SHORT else 500
    return client.generate(
        token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, timeout_s=60
    )


@contextmanager
def stopped(cluster: LocalCluster, name: str) -> Iterator[None]:
    os.kill(cluster.pids[name], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(cluster.pids[name], signal.SIGCONT)


@asynccontextmanager
async def ledger_of(cluster: LocalCluster, name: str) -> AsyncIterator[Held]:
    """Asks one worker what it holds, quickly and again and again."""
    address = next(w.address for w in (await cluster.status()).workers if w.name == name)
    async with open_channel(address) as channel:
        stub = AdminServiceStub(channel)

        async def held() -> dict[str, int]:
            return dict((await stub.GetLedger(GetLedgerRequest(), timeout=5.0)).counts)

        await held()
        yield held


async def until(is_so: Callable[[], Awaitable[bool]], within_s: float = STOPPED_AT_MOST_S) -> None:
    async with asyncio.timeout(within_s):
        while not await is_so():
            await asyncio.sleep(0.001)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("before")
async def test_queued(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    """Those that fit into the credit are on their way to a prefill worker that does not read."""
    with stopped(tiny_cluster, "prefill-0"):
        asked = [ask(tiny_client, long()) for _ in range(NUM_FITTING + TIMES)]

        async def are_queued() -> bool:
            return sum(bucket.num_waiting for bucket in (await tiny_cluster.status()).buckets) == TIMES

        await until(are_queued)
        for generation in asked:
            generation.cancel()

        async def is_empty() -> bool:
            return not any(bucket.num_waiting for bucket in (await tiny_cluster.status()).buckets)

        # Cancelling what waits takes no worker: the one it waits for is still stopped.
        await until(is_empty)
        assert await is_empty()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("before")
async def test_prefilling(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    """One after the other, each in the middle of its steps."""
    num_caught = 0
    async with ledger_of(tiny_cluster, "prefill-0") as held:
        for _ in range(4 * TIMES):
            generation = ask(tiny_client, long())
            first = asyncio.ensure_future(anext(aiter(generation)))
            is_running = False
            while not first.done() and not is_running:
                is_running = (await held())["requests_running"] > 0
            num_caught += is_running and not first.done()
            generation.cancel()
            await asyncio.gather(first, return_exceptions=True)
            if num_caught == TIMES:
                break
    assert num_caught == TIMES


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("before")
async def test_transferring(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    """All have their first token, and a decode worker that does not read their KV."""
    async with (
        ledger_of(tiny_cluster, "prefill-0") as held_by_prefill,
        ledger_of(tiny_cluster, "decode-0") as held_by_decode,
    ):

        async def are_reserved() -> bool:
            return (await held_by_decode())["leases"] == TIMES

        async def are_computed() -> bool:
            held = await held_by_prefill()
            return held["transfers"] == TIMES and held["requests_running"] == held["requests_waiting"] == 0

        with stopped(tiny_cluster, "prefill-0"):
            asked = [ask(tiny_client, SHORT) for _ in range(TIMES)]
            await until(are_reserved)
            os.kill(tiny_cluster.pids["decode-0"], signal.SIGSTOP)
        try:
            await until(are_computed)
            answers = [aiter(generation) for generation in asked]
            firsts = await asyncio.gather(*map(anext, answers))
            assert [chunk.start_index for chunk in firsts] == [0] * TIMES
            for generation in asked:
                generation.cancel()
        finally:
            os.kill(tiny_cluster.pids["decode-0"], signal.SIGCONT)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("before")
async def test_decoding(tiny_cluster: LocalCluster, tiny_client: AsyncClient) -> None:
    """All in one batch; they leave it a few at a time, while it runs."""
    asked = [ask(tiny_client, SHORT) for _ in range(TIMES)]
    answers = [aiter(generation) for generation in asked]
    async with ledger_of(tiny_cluster, "decode-0") as held:

        async def are_running() -> bool:
            return (await held())["requests_running"] == TIMES

        await until(are_running, within_s=10.0)
        for generation, answer in zip(asked, answers, strict=True):
            chunk = await anext(answer)
            while chunk.start_index == 0:
                chunk = await anext(answer)
            assert chunk.start_index + len(chunk.token_ids) < MANY
            generation.cancel()
