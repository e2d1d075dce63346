"""A decode worker that is told to leave: nothing new, everything begun to its end, the rest handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from baton.drain import LEAVE_S
from baton.errors import Draining, PeerLost
from baton.limits import Limits
from decode_worker.worker import DecodeWorker
from kvtransfer.contract import Committed, Gone, GoneReason
from tests.cluster import make_decode
from tests.decode_worker.test_worker import KV, A, B, rig
from tests.fakes import KvNetwork, expected_answer
from tests.played_router import DecodeDown, PlayedRouter, routing, sequence
from tests.timed_worker import timed, virtually

TOKEN_S = 0.01
PROMPT = list(range(4))


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Leaving:
    """A worker whose steps take 10 ms per token, and the router it serves."""

    worker: DecodeWorker
    router: PlayedRouter

    def compute(self, attempt_id: bytes, max_tokens: int, *, age_ms: int = 0) -> None:
        message = sequence(PROMPT, max_tokens=max_tokens, age_ms=age_ms)
        self.router.send(reserve={"attempt_id": attempt_id, "sequence": message, "compute_locally": True})

    def drain(self, grace_s: float) -> asyncio.Task[None]:
        return asyncio.create_task(self.worker.drain(grace_s))

    async def last_tokens(self) -> tuple[list[int], str]:
        """The tokens of the only attempt, and the code of the failure that ended it, if any."""
        tokens: list[int] = []
        while True:
            message = await self.router.any()
            if message.WhichOneof("message") == "failed":
                return tokens, message.failed.failure.code
            for event in message.step.tokens:
                tokens += event.token_ids
                if event.finish_reason:
                    return tokens, ""


@asynccontextmanager
async def leaving(**options: Any) -> AsyncIterator[Leaving]:
    worker = make_decode("decode-0", 2, KvNetwork(), **options)
    async with timed(worker, DecodeDown, token_s=TOKEN_S) as router:
        await router.next("hello")
        await router.next("capacity")
        yield Leaving(worker, router)


@virtually
async def test_its_routers_hear_of_it_at_once() -> None:
    async with leaving() as r:
        assert not (await r.router.heartbeat()).is_draining
        began = now()
        r.drain(grace_s=1.0)
        assert (await r.router.heartbeat()).is_draining
        assert now() == began
        assert (await r.router.heartbeat()).is_draining


@virtually
async def test_what_runs_ends_within_the_grace_time_and_then_the_worker_goes() -> None:
    async with leaving() as r:
        r.compute(A, max_tokens=20)
        await r.router.next("reserve_result")
        draining = r.drain(grace_s=1.0)
        tokens, failure = await r.last_tokens()
        assert (tokens, failure) == (expected_answer(PROMPT, 20, KV), "")
        ended = now()
        assert not draining.done()
        r.router.session.cut()
        await draining
        assert now() == ended
        assert not any(r.worker.ledger().values())


@virtually
async def test_the_end_of_the_grace_time_hands_over_what_has_not_ended() -> None:
    async with leaving() as r:
        r.compute(A, max_tokens=90)
        await r.router.next("reserve_result")
        began = now()
        draining = r.drain(grace_s=0.5)
        tokens, failure = await r.last_tokens()
        assert failure == "DRAINING"
        assert now() - began == pytest.approx(0.5)
        # The prompt takes 40 ms, and then each token 10.
        assert len(tokens) in (46, 47)
        assert tokens == expected_answer(PROMPT, len(tokens), KV)
        r.router.session.cut()
        await draining
        # The step under way had still to end.
        assert now() - began < 0.5 + 2 * TOKEN_S
        assert not any(r.worker.ledger().values())


@virtually
async def test_what_outgrows_its_scale_is_computed_anew_by_the_worker_that_leaves() -> None:
    limits = Limits(max_model_len=10_000, vocab_size=10_000, rope_steps=(6, 12, 10_000))
    async with leaving(limits=limits) as r:
        r.compute(A, max_tokens=20)
        await r.router.next("reserve_result")
        draining = r.drain(grace_s=1.0)
        assert await r.last_tokens() == (expected_answer(PROMPT, 20, KV, rope_steps=limits.rope_steps), "")
        r.router.session.cut()
        await draining
        assert not any(r.worker.ledger().values())


@virtually
async def test_what_gives_way_to_older_ones_is_resumed_by_the_worker_that_leaves() -> None:
    # Each comes to 23 tokens of KV, 6 blocks of 4.
    async with leaving(num_blocks=8) as r:
        r.compute(A, max_tokens=20, age_ms=500)
        r.compute(B, max_tokens=20)
        await r.router.next("reserve_result")
        draining = r.drain(grace_s=1.0)
        tokens: dict[bytes, list[int]] = {A: [], B: []}
        while any(len(answer) < 20 for answer in tokens.values()):
            message = await r.router.any()
            assert message.WhichOneof("message") not in ("failed", "preempted")
            for event in message.step.tokens:
                tokens[event.attempt_id] += event.token_ids
        assert tokens == dict.fromkeys((A, B), expected_answer(PROMPT, 20, KV))
        r.router.session.cut()
        await draining
        assert not any(r.worker.ledger().values())


@virtually
async def test_no_grace_time_hands_over_at_once() -> None:
    async with leaving() as r:
        r.compute(A, max_tokens=90)
        await r.router.next("reserve_result")
        began = now()
        r.drain(grace_s=0.0)
        assert await r.last_tokens() == ([], "DRAINING")
        assert now() == began


@virtually
async def test_nothing_is_reserved_once_it_is_leaving() -> None:
    async with leaving() as r:
        r.compute(A, max_tokens=5)
        assert (await r.router.next("reserve_result")).HasField("lease")
        r.drain(grace_s=1.0)
        await r.router.heartbeat()
        for compute_locally in (True, False):
            message = sequence(PROMPT, max_tokens=5)
            command = {"attempt_id": B, "sequence": message, "compute_locally": compute_locally}
            r.router.send(reserve=command)
            while (message := await r.router.any()).WhichOneof("message") != "reserve_result":
                pass
            assert message.reserve_result.refusal.failure.code == "DRAINING"
        assert set(r.worker._attempts) <= {A}


@virtually
async def test_no_router_joins_once_it_is_leaving() -> None:
    async with leaving() as r:
        r.compute(A, max_tokens=20)
        await r.router.next("reserve_result")
        r.drain(grace_s=1.0)
        await r.router.heartbeat()
        async with routing(r.worker, DecodeDown, "router-1") as late:
            assert isinstance(await late.refused(), Draining)


@virtually
async def test_a_router_that_stays_is_waited_for_a_stated_time() -> None:
    async with leaving() as r:
        began = now()
        await r.drain(grace_s=5.0)
        assert now() - began == pytest.approx(LEAVE_S)


@virtually
async def test_without_routers_it_goes_at_once() -> None:
    worker = make_decode("decode-0", 2, KvNetwork())
    began = now()
    await worker.drain(grace_s=5.0)
    assert now() == began


async def test_kv_that_was_reserved_for_before_is_taken_and_decoded() -> None:
    async with rig() as r:
        prompt = list(range(13))
        lease_id = await r.lease(A, prompt, max_tokens=5)
        draining = asyncio.create_task(r.worker.drain(10.0))
        assert (await r.router.heartbeat()).is_draining
        assert await r.prefill.push(A, lease_id, prompt) == Committed()
        assert (await r.router.next("lease_outcome")).committed
        assert (await r.tokens(A, 5))[0] == expected_answer(prompt, 5, KV)
        await r.router.leave()
        await draining
        assert r.nothing()


async def test_kv_that_comes_after_the_hand_over_is_refused() -> None:
    async with rig() as r:
        prompt = list(range(13))
        lease_id = await r.lease(A, prompt, max_tokens=5)
        draining = asyncio.create_task(r.worker.drain(0.0))
        assert (await r.router.next("failed")).failure.code == "DRAINING"
        assert await r.prefill.push(A, lease_id, prompt) == Gone(GoneReason.CANCELLED)
        await r.router.leave()
        await draining
        assert r.nothing()


@virtually
async def test_a_worker_is_ready_until_it_leaves_and_alive_to_the_end() -> None:
    async with leaving() as r:
        health = r.worker.health()
        assert (health.is_ready, health.is_alive, health.reason) == (True, True, "")
        r.drain(grace_s=1.0)
        await r.router.heartbeat()
        health = r.worker.health()
        assert (health.is_ready, health.is_alive, health.reason) == (False, True, "it is leaving")


class StuckRunner:
    """A device that never finishes a step."""

    async def execute(self, batch: object, on_layers: object = None) -> None:
        await asyncio.Event().wait()


@virtually
async def test_a_stuck_device_costs_readiness_within_ten_seconds_and_liveness_thirty_later() -> None:
    async with leaving() as r:
        r.worker._steps._runner = StuckRunner()  # type: ignore[assignment]
        r.compute(A, max_tokens=5)
        await r.router.next("reserve_result")
        began, seen = now(), []
        while now() < began + 60.0:
            # A router that says nothing would be taken for lost.
            r.router.send(heartbeat={})
            health = r.worker.health()
            if [health.is_ready, health.is_alive] not in [state for _, state in seen]:
                seen.append((now() - began, [health.is_ready, health.is_alive]))
            await asyncio.sleep(0.25)
        assert [state for _, state in seen] == [[True, True], [False, True], [False, False]]
        assert [at for at, _ in seen] == pytest.approx([0.0, 9.25, 39.25])


@virtually
async def test_a_worker_that_leaves_says_so_though_its_device_is_stuck_as_well() -> None:
    async with leaving() as r:
        r.worker._steps._runner = StuckRunner()  # type: ignore[assignment]
        r.compute(A, max_tokens=5)
        await r.router.next("reserve_result")
        for _ in range(60):
            r.router.send(heartbeat={"attempt_ids": [A]})
            await asyncio.sleep(0.25)
        assert r.worker._steps.is_wedged
        r.drain(grace_s=1.0)
        async with routing(r.worker, DecodeDown, "router-1") as late:
            assert isinstance(await late.refused(), Draining)


@virtually
async def test_a_frozen_step_loop_is_noticed_though_no_step_is_in_flight() -> None:
    worker = make_decode("decode-0", 2, KvNetwork())
    async with routing(worker, DecodeDown) as router:
        assert worker.health().is_ready
        message = sequence(PROMPT, max_tokens=5)
        router.send(reserve={"attempt_id": A, "sequence": message, "compute_locally": True})
        for _ in range(160):
            router.send(heartbeat={"attempt_ids": [A]})
            await asyncio.sleep(0.25)
        health = worker.health()
        assert (health.is_ready, health.is_alive) == (False, False)
        assert health.reason == "its steps make no progress"


async def test_a_router_that_dies_while_it_is_leaving_is_not_waited_for() -> None:
    async with rig() as r:
        await r.lease(A, list(range(13)))
        draining = asyncio.create_task(r.worker.drain(60.0))
        assert (await r.router.heartbeat()).is_draining
        assert isinstance(await _cut(r.router), PeerLost)
        await asyncio.wait_for(draining, 5.0)
        assert r.nothing()


async def _cut(router: PlayedRouter) -> BaseException | None:
    router.session.cut()
    return await router.refused()
