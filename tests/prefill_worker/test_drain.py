"""A prefill worker that is told to leave: KV on its way is committed, the rest handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.drain import LEAVE_S
from baton.errors import Draining
from kvtransfer.contract import Committed
from tests.cluster import make_decode, make_prefill
from tests.fakes import KvNetwork, until
from tests.played_router import PlayedRouter, PrefillDown, routing
from tests.prefill_worker.test_worker import A, B, Rig, rig
from tests.simulation.steps import SimStepRunner
from tests.timed_worker import virtually


@asynccontextmanager
async def leaving(*, token_s: float = 0.01) -> AsyncIterator[Rig]:
    """A worker that takes 10 ms per token, paired with a decode worker."""
    async with rig() as r:
        r.worker._steps._runner = SimStepRunner(
            r.worker._engine.cache, lambda batch: token_s * batch.num_tokens, lambda: None
        )
        yield r


def now() -> float:
    return asyncio.get_running_loop().time()


async def ended(router: PlayedRouter) -> Any:
    while (message := await router.any()).WhichOneof("message") != "ended":
        pass
    return message.ended


@virtually
async def test_its_routers_hear_of_it_at_once() -> None:
    async with leaving() as r:
        assert not (await r.router.heartbeat()).is_draining
        began = now()
        draining = asyncio.create_task(r.worker.drain(1.0))
        assert (await r.router.heartbeat()).is_draining
        assert now() == began
        r.router.session.cut()
        await draining


@virtually
async def test_prompts_are_computed_and_their_kv_committed_before_it_goes() -> None:
    async with leaving() as r:
        r.prefill(A, list(range(40)))
        # The first step of 16 tokens is over, and the KV on its way.
        await asyncio.sleep(0.2)
        draining = asyncio.create_task(r.worker.drain(1.0))
        assert (await ended(r.router)).committed
        at = now()
        r.router.session.cut()
        await draining
        assert now() == at
        assert r.nothing()
        assert r.decode._leases.abort_if_uncommitted(A, now()) == Committed()


@virtually
async def test_the_end_of_the_grace_time_hands_over_a_prompt_that_is_not_computed() -> None:
    async with leaving(token_s=0.02) as r:
        r.prefill(A, list(range(40)))
        began = now()
        draining = asyncio.create_task(r.worker.drain(0.5))
        assert (await ended(r.router)).failure.code == "DRAINING"
        assert now() - began == pytest.approx(0.5)
        r.router.session.cut()
        await draining
        # A step of 16 tokens was under way.
        assert now() - began < 0.5 + 0.32
        assert r.nothing()


async def test_a_commit_under_way_at_the_end_is_handed_over_and_leaves_no_task() -> None:
    async with rig() as r:
        r.network.may_commit.clear()
        r.prefill(A, list(range(20)))
        await until(lambda: r.network.num_commits_waiting == 1)
        draining = asyncio.create_task(r.worker.drain(0.0))
        assert (await ended(r.router)).failure.code == "DRAINING"
        assert not r.worker._attempts
        await r.router.leave()
        await draining
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert [name for name in names if name.startswith("transfer-")] == []
        assert r.nothing()


@virtually
async def test_no_prompt_is_taken_once_it_is_leaving_and_its_credit_comes_back() -> None:
    async with leaving() as r:
        r.prefill(A, list(range(40)), cost=60)
        await asyncio.sleep(0.1)
        draining = asyncio.create_task(r.worker.drain(1.0))
        await r.router.heartbeat()
        r.prefill(B, list(range(8)), cost=40)
        assert (await r.router.next("credit_grant")).tokens == 40
        refused = await r.router.next("ended")
        assert (refused.attempt_id, refused.failure.code) == (B, "DRAINING")
        last = await ended(r.router)
        assert (last.attempt_id, last.committed) == (A, True)
        r.router.session.cut()
        await draining
        assert r.nothing()


@virtually
async def test_no_router_joins_once_it_is_leaving() -> None:
    async with leaving() as r:
        draining = asyncio.create_task(r.worker.drain(1.0))
        await r.router.heartbeat()
        async with routing(r.worker, PrefillDown, "router-1") as late:
            assert isinstance(await late.refused(), Draining)
        await draining


@virtually
async def test_it_says_so_though_its_device_is_stuck_as_well() -> None:
    async with leaving(token_s=100.0) as r:
        r.prefill(A, list(range(8)))
        for _ in range(60):
            r.router.send(heartbeat={})
            await asyncio.sleep(0.25)
        assert r.worker._steps.is_wedged
        draining = asyncio.create_task(r.worker.drain(0.0))
        async with routing(r.worker, PrefillDown, "router-1") as late:
            assert isinstance(await late.refused(), Draining)
        await draining


@virtually
async def test_a_router_that_stays_is_waited_for_a_stated_time() -> None:
    async with leaving() as r:
        began = now()
        await r.worker.drain(5.0)
        assert now() - began == pytest.approx(LEAVE_S)


async def test_it_is_ready_when_all_decode_workers_are_tried_and_one_is_reached() -> None:
    network = KvNetwork()
    worker = make_prefill("prefill-0", 1, network)
    decode = make_decode("decode-0", 2, network)
    reachable = asyncio.Event()
    pair = network.pair

    async def slowly(peer: Any) -> Any:
        await reachable.wait()
        return await pair(peer)

    network.pair = slowly  # type: ignore[method-assign]
    assert worker.health().reason == "it is paired with no decode worker"
    async with routing(worker, PrefillDown) as router:
        router.send(pair={"worker": "decode-0", "incarnation": 2, "address": decode.transfer_address})
        await until(lambda: "still pairing" in worker.health().reason)
        assert not worker.health().is_ready
        reachable.set()
        await until(lambda: worker.health().is_ready)
        # One that cannot be reached takes nothing from the others.
        router.send(pair={"worker": "decode-1", "incarnation": 3, "address": "nowhere"})
        await until(lambda: len(worker._pairs) == 2 and worker.health().is_ready)
        router.send(part={"incarnation": 2})
        await until(lambda: worker.health().reason == "it is paired with no decode worker")
        assert worker.health().is_alive
