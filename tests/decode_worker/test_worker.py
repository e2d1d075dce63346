"""The decode worker's shell against a router that the test plays, fed by a real prefill-side sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from baton.errors import IncompatiblePeer, PeerLost
from baton.v1 import common_pb2
from decode_worker.worker import DecodeWorker
from kvtransfer.contract import Committed, FirstToken, Gone, GoneReason, Outcome, Peer, TransferTarget
from kvtransfer.outgoing import HostReader
from kvtransfer.sender import KvSender, KvSource
from tests.cluster import make_decode, make_engine
from tests.fakes import FINGERPRINT, KvNetwork, expected_answer, kv_rows, until
from tests.played_router import DecodeDown, PlayedRouter, routing, sequence, stepping

KV = (2, 2, 3, 5)
A, B = b"A" * 16, b"B" * 16
LENGTH = common_pb2.FINISH_REASON_LENGTH


class Prefill:
    """The sender of a prefill worker, with the KV of whatever tokens a test names."""

    def __init__(self, network: KvNetwork) -> None:
        engine = make_engine()
        self.cache, self.pool = engine.cache, engine.pool
        self.sender = KvSender(HostReader(engine.cache), network)

    async def push(
        self,
        attempt_id: bytes,
        lease_id: bytes,
        tokens: list[int],
        *,
        start: int = 0,
        token_id: int | None = None,
        num_held_tokens: int = 0,
    ) -> Outcome:
        """Sends the KV of these tokens and commits with the token that follows, or with the one given."""
        await self.sender.transport.pair(Peer(worker="decode-0", incarnation=2, address="kv-decode-0-2"))
        block_ids = self.pool.allocate(-(-len(tokens) // 4))
        for position, kv in enumerate(kv_rows(tokens, KV)):
            block = self.cache.logical[block_ids[position // 4]]
            block[:, :, :, position % 4] = torch.from_numpy(kv.astype(np.float32))
        source = KvSource(attempt_id=attempt_id, block_ids=block_ids, num_tokens=len(tokens))
        target = TransferTarget(
            lease_id=lease_id,
            worker="decode-0",
            incarnation=2,
            num_held_tokens=num_held_tokens,
        )
        token_id = expected_answer(tokens, 1, KV)[0] if token_id is None else token_id
        first = FirstToken(token_id=token_id, logprob=None, start_index=start)
        async with self.sender.transfer(source, target) as transfer:
            return (await transfer.commit(first)).outcome


@dataclass
class Rig:
    worker: DecodeWorker
    router: PlayedRouter
    prefill: Prefill
    network: KvNetwork

    def reserve(self, attempt_id: bytes, prompt: list[int], **fields: Any) -> None:
        outputs, locally = fields.pop("outputs", ()), fields.pop("compute_locally", False)
        message = sequence(prompt, outputs, **fields)
        self.router.send(reserve={"attempt_id": attempt_id, "sequence": message, "compute_locally": locally})

    async def lease(self, attempt_id: bytes, prompt: list[int], **fields: Any) -> bytes:
        self.reserve(attempt_id, prompt, **fields)
        result = await self.router.next("reserve_result")
        assert result.HasField("lease"), result
        lease_id: bytes = result.lease.lease_id
        return lease_id

    async def tokens(self, attempt_id: bytes, count: int) -> tuple[list[int], int]:
        """The next tokens of an attempt, which must follow each other, and the last finish reason."""
        got: list[int] = []
        reason = 0
        while len(got) < count:
            step = await self.router.next("step")
            for event in step.tokens:
                assert event.attempt_id == attempt_id
                got += event.token_ids
                reason = event.finish_reason
        return got, reason

    def nothing(self) -> bool:
        return not any(self.worker.ledger().values())


@asynccontextmanager
async def rig(**options: Any) -> AsyncIterator[Rig]:
    network = KvNetwork()
    worker = make_decode("decode-0", 2, network, **options)
    async with stepping(worker), routing(worker, DecodeDown) as router:
        await router.next("hello")
        await router.next("capacity")
        yield Rig(worker, router, Prefill(network), network)


async def test_a_session_opens_with_hello_and_capacity() -> None:
    worker = make_decode("decode-0", 2, KvNetwork())
    async with routing(worker, DecodeDown) as router:
        assert (await router.next("hello")).incarnation == 2
        capacity = await router.next("capacity")
        assert (capacity.num_blocks, capacity.block_size) == (64, 4)
        assert capacity.transfer_address == "kv-decode-0-2"
        assert (await router.heartbeat()).num_free_blocks == 64


async def test_a_request_decodes_from_the_commit_to_its_last_token() -> None:
    async with rig() as r:
        prompt = list(range(13))
        expected = expected_answer(prompt, 5, KV)
        lease_id = await r.lease(A, prompt, max_tokens=5)
        # 13 tokens and the next, in blocks of 4; what comes then is growth.
        assert r.worker.ledger()["blocks_used"] == 4
        assert await r.prefill.push(A, lease_id, prompt) == Committed()
        assert (await r.router.next("lease_outcome")).committed
        tokens, reason = await r.tokens(A, 5)
        assert (tokens, reason) == (expected, LENGTH)
        assert r.nothing()


async def test_a_resumed_request_keeps_its_prompt_and_counts_from_its_tokens() -> None:
    async with rig() as r:
        prompt = list(range(10))
        answer = expected_answer(prompt, 6, KV)
        lease_id = await r.lease(A, prompt, outputs=answer[:3], max_tokens=6)
        await r.prefill.push(A, lease_id, prompt + answer[:3], start=3)
        await r.router.next("lease_outcome")
        first = await r.router.next("step")
        assert (first.tokens[0].start_index, first.tokens[0].finish_reason) == (3, 0)
        assert list(first.tokens[0].token_ids) == answer[3:4]
        tokens, reason = await r.tokens(A, 2)
        assert (tokens, reason) == (answer[4:], LENGTH)
        assert r.nothing()


async def test_tokens_of_one_step_travel_in_one_message() -> None:
    async with rig() as r:
        runner: Any = r.worker._engine.runner
        runner.may_run.clear()
        for attempt_id in (A, B):
            prompt = [attempt_id[0], 2, 3]
            await r.prefill.push(attempt_id, await r.lease(attempt_id, prompt, max_tokens=3), prompt)
            await r.router.next("lease_outcome")
            await r.router.next("step")
        runner.may_run.set()
        sizes = [len((await r.router.next("step")).tokens) for _ in range(3)]
        # A's own step was under way when B came.
        assert sizes == [1, 2, 1]
        await until(r.nothing)


async def test_a_full_cache_refuses_with_a_hint() -> None:
    async with rig(num_blocks=8) as r:
        await r.lease(A, list(range(20)), max_tokens=5)
        r.reserve(B, list(range(20)), max_tokens=5)
        result = await r.router.next("reserve_result")
        failure = result.refusal.failure
        assert (failure.code, failure.retry_after_ms) == ("OVERLOADED", 100)
        assert result.num_free_blocks == 2


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        ([20_000], {}, "token_ids"),
        ([1], {"max_tokens": 20_000}, "max_tokens"),
        ([1] * 300, {"max_tokens": 5}, "max_tokens"),
        ([1, 2], {"outputs": [1] * 5}, "token_ids"),
    ],
)
async def test_a_bad_reservation_is_refused_by_field(
    prompt: list[int], fields: dict[str, Any], field: str
) -> None:
    async with rig() as r:
        r.reserve(A, prompt, **fields)
        failure = (await r.router.next("reserve_result")).refusal.failure
        assert (failure.code, failure.field) == ("INVALID_REQUEST", field)
        assert r.nothing()


async def test_an_attempt_id_of_another_length_is_refused() -> None:
    async with rig() as r:
        r.reserve(b"short", [1, 2])
        assert (await r.router.next("reserve_result")).refusal.failure.field == "attempt_id"


@pytest.mark.parametrize("stage", ["reserved", "stepping", "decoding"])
async def test_a_release_at_any_stage_returns_everything(stage: str) -> None:
    async with rig() as r:
        runner: Any = r.worker._engine.runner
        prompt = list(range(13))
        lease_id = await r.lease(A, prompt, max_tokens=40)
        if stage == "stepping":
            runner.may_run.clear()
        if stage != "reserved":
            await r.prefill.push(A, lease_id, prompt)
            await r.router.next("lease_outcome")
        if stage == "stepping":
            await until(lambda: runner.num_waiting == 1)
        if stage == "decoding":
            await r.tokens(A, 3)
        r.router.send(release={"attempt_id": A})
        if stage == "stepping":
            await until(lambda: r.worker.ledger()["blocks_fenced"] == 4)
            runner.may_run.set()
        await until(r.nothing)
        r.router.send(release={"attempt_id": A})
        if stage == "reserved":
            assert await r.prefill.push(A, lease_id, prompt) == Gone(GoneReason.CANCELLED)


async def test_a_release_that_overtakes_its_reservation_refuses_it() -> None:
    async with rig() as r:
        r.router.send(release={"attempt_id": A})
        r.reserve(A, [1, 2, 3])
        assert (await r.router.next("reserve_result")).refusal.failure.code == "CANCELLED"
        assert r.nothing()


async def test_abort_before_the_commit_is_gone_and_stays_gone() -> None:
    async with rig() as r:
        prompt = list(range(9))
        lease_id = await r.lease(A, prompt)
        r.router.send(abort_if_uncommitted={"attempt_id": A})
        outcome = await r.router.next("lease_outcome")
        assert (outcome.attempt_id, outcome.gone) == (A, common_pb2.GONE_REASON_CANCELLED)
        assert r.nothing()
        assert await r.prefill.push(A, lease_id, prompt) == Gone(GoneReason.CANCELLED)
        r.router.send(abort_if_uncommitted={"attempt_id": A})
        assert (await r.router.next("lease_outcome")).gone == common_pb2.GONE_REASON_CANCELLED


async def test_abort_after_the_commit_changes_nothing() -> None:
    async with rig() as r:
        runner: Any = r.worker._engine.runner
        prompt = list(range(9))
        lease_id = await r.lease(A, prompt, max_tokens=4)
        runner.may_run.clear()
        await r.prefill.push(A, lease_id, prompt)
        assert (await r.router.next("lease_outcome")).committed
        first, _ = await r.tokens(A, 1)
        r.router.send(abort_if_uncommitted={"attempt_id": A})
        assert (await r.router.next("lease_outcome")).committed
        runner.may_run.set()
        rest, reason = await r.tokens(A, 3)
        assert (first + rest, reason) == (expected_answer(prompt, 4, KV), LENGTH)
        # Asked once more after its end, the answer is still the same.
        r.router.send(abort_if_uncommitted={"attempt_id": A})
        assert (await r.router.next("lease_outcome")).committed


async def test_a_lease_that_nobody_renews_expires_without_any_new_request() -> None:
    async with rig(lease_ttl_s=0.1) as r:
        await r.lease(A, list(range(9)))
        outcome = await r.router.next("lease_outcome")
        assert outcome.gone == common_pb2.GONE_REASON_EXPIRED
        await until(r.nothing)


async def test_a_lease_expires_in_time_although_an_older_tombstone_lives_longer() -> None:
    async with rig(lease_ttl_s=0.1) as r:
        await r.lease(A, list(range(9)))
        await r.router.next("lease_outcome")
        # The table's next deadline is now that of A's tombstone, 30 s away.
        started = asyncio.get_running_loop().time()
        await r.lease(B, list(range(9)))
        outcome = await r.router.next("lease_outcome")
        assert (outcome.attempt_id, outcome.gone) == (B, common_pb2.GONE_REASON_EXPIRED)
        assert asyncio.get_running_loop().time() - started < 1
        await until(r.nothing)


async def test_heartbeats_tell_how_many_values_its_cache_could_not_hold() -> None:
    async with rig() as r:
        r.worker.receiver.counters["saturated_values"] += 12
        assert (await r.router.heartbeat()).num_saturated_values == 12


async def test_heartbeats_renew_leases() -> None:
    async with rig(lease_ttl_s=0.2) as r:
        await r.lease(A, list(range(9)))
        for _ in range(8):
            await asyncio.sleep(0.05)  # real time must pass for a lease to grow old
            r.router.send(heartbeat={"attempt_ids": [A, B]})
        await asyncio.sleep(0)
        assert r.worker.ledger()["leases"] == 1
        assert (await r.router.next("lease_outcome")).gone == common_pb2.GONE_REASON_EXPIRED


async def test_an_unrenewed_request_that_decodes_ends_too() -> None:
    async with rig(lease_ttl_s=0.1) as r:
        runner: Any = r.worker._engine.runner
        prompt = list(range(9))
        lease_id = await r.lease(A, prompt, max_tokens=50)
        runner.may_run.clear()
        await r.prefill.push(A, lease_id, prompt)
        await until(lambda: r.worker.ledger()["attempts"] == 0)
        runner.may_run.set()
        await until(r.nothing)
        assert not any(r.worker.ledger().values())


async def test_a_deadline_fails_the_request_by_name() -> None:
    async with rig() as r:
        await r.lease(A, list(range(9)), remaining_ms=30)
        failed = await r.router.next("failed")
        assert (failed.attempt_id, failed.failure.code) == (A, "DEADLINE_EXCEEDED")
        await until(r.nothing)


async def test_a_router_that_leaves_takes_its_requests_along_and_no_others() -> None:
    async with rig() as r, routing(r.worker, DecodeDown, "router-1") as other:
        await r.lease(A, list(range(9)))
        other.send(reserve={"attempt_id": B, "sequence": sequence(list(range(9)))})
        await other.next("hello")
        await other.next("capacity")
        await other.next("reserve_result")
        await r.router.leave()
        ledger = r.worker.ledger()
        assert (ledger["attempts"], ledger["leases"], ledger["blocks_used"]) == (1, 1, 3)
        await other.leave()
        await until(r.nothing)


async def test_kv_that_cannot_be_verified_ends_the_lease_and_its_router_hears_of_it() -> None:
    async with rig() as r:
        lease_id = await r.lease(A, list(range(9)))
        # Fewer tokens than the lease expects.
        assert await r.prefill.push(A, lease_id, list(range(4))) == Gone(GoneReason.CORRUPT)
        outcome = await r.router.next("lease_outcome")
        assert (outcome.attempt_id, outcome.gone) == (A, common_pb2.GONE_REASON_CORRUPT)
        await until(r.nothing)


async def test_a_first_token_outside_the_vocabulary_fails_the_request_and_reaches_nobody() -> None:
    async with rig() as r:
        lease_id = await r.lease(A, [1, 2, 3])
        await r.prefill.push(A, lease_id, [1, 2, 3], token_id=10_000)
        assert (await r.router.next("failed")).failure.code == "INTERNAL"
        assert r.nothing()


async def test_a_write_for_another_incarnation_is_fenced() -> None:
    async with rig() as r:
        lease_id = await r.lease(A, list(range(9)))
        r.worker.receiver._incarnation = 3
        assert await r.prefill.push(A, lease_id, list(range(9))) == Gone(GoneReason.FENCED)
        assert r.worker.ledger()["leases"] == 1


async def test_a_router_of_another_model_is_refused_by_name() -> None:
    worker = make_decode("decode-0", 2, KvNetwork())
    other = common_pb2.Fingerprint()
    other.CopyFrom(FINGERPRINT)
    other.num_layers = 3
    object.__setattr__(worker._identity, "fingerprint", other)
    async with routing(worker, DecodeDown) as router:
        error = await router.refused()
    assert isinstance(error, IncompatiblePeer)
    assert error.field == "num_layers"


async def test_an_unknown_message_in_mid_session_ends_it() -> None:
    async with rig() as r:
        r.router.send()
        error = await r.router.refused()
        assert isinstance(error, PeerLost)
        assert "an unknown message" in str(error)


async def test_a_failing_step_ends_the_worker() -> None:
    network = KvNetwork()
    worker = make_decode("decode-0", 2, network)
    worker._engine.runner.fail_with = RuntimeError("device lost")  # type: ignore[attr-defined]
    steps = asyncio.create_task(worker.run())
    async with routing(worker, DecodeDown) as router:
        await router.next("hello")
        await router.next("capacity")
        router.send(reserve={"attempt_id": A, "sequence": sequence([1, 2, 3])})
        lease_id = (await router.next("reserve_result")).lease.lease_id
        await Prefill(network).push(A, lease_id, [1, 2, 3])
        with pytest.raises(RuntimeError, match="device lost"):
            async with asyncio.timeout(5):
                await steps
