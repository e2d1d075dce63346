"""The prefill worker's shell against a router that the test plays: every end of an attempt is one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from baton.errors import IncompatiblePeer, InvalidRequest, PeerLost
from baton.v1 import common_pb2
from kvtransfer.contract import Ticket, TransferTarget
from prefill_worker.worker import PrefillWorker
from tests.cluster import make_decode, make_prefill
from tests.fakes import FINGERPRINT, KvNetwork, expected_answer, until
from tests.played_router import PlayedRouter, PrefillDown, routing, sequence, stepping

KV = (2, 2, 3, 5)
A, B = b"A" * 16, b"B" * 16


@dataclass
class Rig:
    worker: PrefillWorker
    decode: Any
    network: KvNetwork
    router: PlayedRouter

    def target(self, attempt_id: bytes, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """A lease at a real decode worker's table, as a router passes it on."""
        lease = self.decode._leases.reserve(
            attempt_id,
            None,
            num_blocks=10,
            num_tokens=len(prompt),
            now=asyncio.get_running_loop().time(),
        )
        return {
            "lease_id": lease.lease_id,
            "worker": "decode-0",
            "incarnation": 2,
        } | fields

    def prefill(self, attempt_id: bytes, prompt: list[int], *, cost: int = 50, **fields: Any) -> None:
        target = fields.pop("target", None) or self.target(attempt_id, prompt)
        outputs = fields.pop("outputs", ())
        self.router.send(
            prefill={
                "attempt_id": attempt_id,
                "sequence": sequence(prompt, outputs, **fields),
                "target": target,
                "cost_tokens": cost,
            }
        )

    def nothing(self) -> bool:
        return not any(self.worker.ledger().values())


@asynccontextmanager
async def rig(**options: Any) -> AsyncIterator[Rig]:
    network = KvNetwork()
    decode = make_decode("decode-0", 2, network)
    # Only its arbiter is used here.
    decode.receiver.on_committed = lambda lease, token: None
    decode.receiver.on_lost = lambda lease, reason: None
    worker = make_prefill("prefill-0", 1, network, credit_tokens=100, **options)
    async with stepping(worker), routing(worker, PrefillDown) as router:
        await router.next("hello")
        await router.next("capacity")
        assert (await router.next("credit_grant")).tokens == 100
        router.send(pair={"worker": "decode-0", "incarnation": 2, "address": decode.transfer_address})
        assert (await router.next("pair_status")).transport == "memory"
        yield Rig(worker, decode, network, router)


async def test_a_session_opens_with_hello_capacity_and_credit() -> None:
    network = KvNetwork()
    worker = make_prefill("prefill-0", 1, network, credit_tokens=70)
    async with routing(worker, PrefillDown) as router:
        hello = await router.next("hello")
        assert (hello.name, hello.role, hello.incarnation) == ("prefill-0", common_pb2.ROLE_PREFILL, 1)
        capacity = await router.next("capacity")
        assert (capacity.num_blocks, capacity.block_size) == (64, 4)
        assert capacity.kv_dtype == "float32"
        assert (await router.next("credit_grant")).tokens == 70
        assert (await router.heartbeat()).num_free_blocks == 64


async def test_a_prompt_yields_credit_token_and_commit_in_this_order() -> None:
    async with rig() as r:
        prompt = list(range(20))
        r.prefill(A, prompt, cost=50)
        assert (await r.router.next("credit_grant")).tokens == 50
        token = await r.router.next("token")
        assert list(token.token_ids) == expected_answer(prompt, 1, KV)
        assert (token.attempt_id, token.start_index, token.finish_reason) == (A, 0, 0)
        assert list(token.logprobs) == []
        ended = await r.router.next("ended")
        assert ended.committed
        # 20 tokens of 2 layers, keys and values, 3 heads, 5 elements of 4 bytes.
        assert ended.transfer_bytes == 20 * 2 * 2 * 3 * 5 * 4
        assert r.nothing()


async def test_a_resumed_request_goes_on_where_it_was() -> None:
    async with rig() as r:
        prompt = list(range(20))
        answer = expected_answer(prompt, 4, KV)
        r.prefill(A, prompt, outputs=answer[:3], target=r.target(A, prompt + answer[:3]))
        await r.router.next("credit_grant")
        token = await r.router.next("token")
        assert (token.start_index, list(token.token_ids)) == (3, [answer[3]])
        assert (await r.router.next("ended")).committed


async def test_a_first_token_that_ends_the_request_needs_no_receiver() -> None:
    async with rig() as r:
        r.prefill(A, list(range(10)), max_tokens=1, target={"lease_id": A, "incarnation": 3})
        await r.router.next("credit_grant")
        assert (await r.router.next("token")).finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (await r.router.next("ended")).finished
        await until(r.nothing)


async def test_logprobs_are_sent_when_asked_for() -> None:
    async with rig() as r:
        r.prefill(A, list(range(10)), max_tokens=1, logprobs=True)
        await r.router.next("credit_grant")
        assert list((await r.router.next("token")).logprobs) == [-0.5]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": [20_000]}, "token_ids"),
        ({"prompt": list(range(10)), "max_tokens": 9_991}, "max_tokens"),
        ({"prompt": list(range(10)), "outputs": [1] * 5}, "token_ids"),
        ({"prompt": [1] * 270}, "prompt"),
    ],
)
async def test_a_bad_command_is_answered_and_its_credit_restored(change: dict[str, Any], field: str) -> None:
    async with rig() as r:
        r.prefill(A, change.pop("prompt"), target={"lease_id": A}, **change)
        assert (await r.router.next("credit_grant")).tokens == 50
        ended = await r.router.next("ended")
        assert (ended.failure.code, ended.failure.field) == ("INVALID_REQUEST", field)
        assert r.nothing()


async def test_an_attempt_id_is_used_once() -> None:
    async with rig() as r:
        r.worker._engine.runner.may_run.clear()
        r.prefill(A, list(range(10)))
        r.prefill(A, list(range(10)), target={"lease_id": A})
        await r.router.next("credit_grant")
        assert (await r.router.next("ended")).failure.code == "INTERNAL"
        r.worker._engine.runner.may_run.set()
        await r.router.next("credit_grant")
        assert (await r.router.next("token")).attempt_id == A
        assert (await r.router.next("ended")).committed


async def test_spending_more_than_is_held_ends_the_session() -> None:
    async with rig() as r:
        r.prefill(A, list(range(10)), cost=101)
        error = await r.router.refused()
        assert isinstance(error, InvalidRequest)
        assert error.field == "cost_tokens"
        assert r.nothing()


async def test_the_first_token_is_sent_before_the_transfer_ends() -> None:
    async with rig() as r:
        r.network.may_commit.clear()
        r.prefill(A, list(range(10)))
        await r.router.next("credit_grant")
        await r.router.next("token")
        await until(lambda: r.network.num_commits_waiting == 1)
        ledger = r.worker.ledger()
        assert (ledger["attempts"], ledger["blocks_used"], ledger["credit_spent_tokens"]) == (1, 3, 0)
        r.network.may_commit.set()
        assert (await r.router.next("ended")).committed


@pytest.mark.parametrize("stage", ["waiting", "stepping", "transferring"])
async def test_a_cancel_at_any_stage_returns_everything(stage: str) -> None:
    async with rig() as r:
        runner = r.worker._engine.runner
        if stage == "transferring":
            r.network.may_commit.clear()
        else:
            runner.may_run.clear()
        r.prefill(A, list(range(30)))
        if stage == "transferring":
            await r.router.next("credit_grant")
            await r.router.next("token")
            await until(lambda: r.network.num_commits_waiting == 1)
        else:
            await until(lambda: runner.num_waiting == 1)
        if stage == "waiting":
            r.prefill(B, list(range(30)))
            await until(lambda: r.worker.ledger()["requests_waiting"] == 1)
        attempt_id = B if stage == "waiting" else A
        r.router.send(cancel={"attempt_id": attempt_id})
        if stage != "transferring":
            assert (await r.router.next("credit_grant")).tokens == 50
        ended = await r.router.next("ended")
        assert (ended.attempt_id, ended.cancelled) == (attempt_id, True)
        if stage == "stepping":
            # The step that reads them has not ended.
            assert r.worker.ledger()["blocks_fenced"] == 8
        if stage == "waiting":
            r.router.send(cancel={"attempt_id": A})
        runner.may_run.set()
        await until(r.nothing)


async def test_an_unknown_cancel_is_ignored() -> None:
    async with rig() as r:
        r.router.send(cancel={"attempt_id": B})
        r.prefill(A, list(range(10)), max_tokens=1)
        await r.router.next("credit_grant")
        assert (await r.router.next("token")).attempt_id == A


async def test_a_deadline_ends_an_attempt_that_waits_for_its_receiver() -> None:
    async with rig() as r:
        r.network.may_commit.clear()
        r.prefill(A, list(range(10)), remaining_ms=50)
        await r.router.next("credit_grant")
        await r.router.next("token")
        assert (await r.router.next("ended")).failure.code == "DEADLINE_EXCEEDED"
        await until(r.nothing)


async def test_a_lease_that_is_gone_is_reported_by_its_reason() -> None:
    async with rig() as r:
        target = r.target(A, list(range(10)))
        r.decode._leases.abort_if_uncommitted(A, asyncio.get_running_loop().time())
        r.prefill(A, list(range(10)), target=target)
        await r.router.next("credit_grant")
        await r.router.next("token")
        failure = (await r.router.next("ended")).failure
        assert failure.code == "KV_TRANSFER_FAILED"
        assert "decode-0 refused the KV: CANCELLED" in failure.message
        await until(r.nothing)


async def test_a_receiver_that_is_not_there_fails_the_attempt_not_the_token() -> None:
    async with rig() as r:
        target = r.target(A, list(range(10)), incarnation=3)
        r.prefill(A, list(range(10)), target=target)
        await r.router.next("credit_grant")
        await r.router.next("token")
        assert (await r.router.next("ended")).failure.code == "PEER_LOST"
        await until(r.nothing)


async def test_whatever_ends_a_transfer_ends_its_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as r:

        @asynccontextmanager
        async def broken(ticket: Ticket, target: TransferTarget) -> AsyncIterator[None]:
            # As gRPC does to a call whose channel is closed under it.
            raise asyncio.CancelledError
            yield

        monkeypatch.setattr(r.network, "open", broken)
        r.prefill(A, list(range(10)))
        await r.router.next("credit_grant")
        await r.router.next("token")
        failure = (await r.router.next("ended")).failure
        assert (failure.code, failure.message) == (
            "KV_TRANSFER_FAILED",
            "the transfer to decode-0 came to no outcome",
        )
        await until(r.nothing)


async def test_a_router_that_leaves_takes_its_attempts_and_its_credit_along() -> None:
    async with rig() as r:
        r.network.may_commit.clear()
        r.prefill(A, list(range(10)))
        r.prefill(B, list(range(30)))
        await until(lambda: r.network.num_commits_waiting >= 1)
        await r.router.leave()
        await until(r.nothing)
        async with routing(r.worker, PrefillDown, "router-1") as other:
            await other.next("hello")
            await other.next("capacity")
            assert (await other.next("credit_grant")).tokens == 100


async def test_credit_is_asked_back_for_a_second_router_and_not_in_a_circle() -> None:
    async with rig() as r, routing(r.worker, PrefillDown, "router-1") as other:
        await other.next("hello")
        await other.next("capacity")
        assert (await r.router.next("credit_reclaim")).tokens == 50
        # Everything is on its way as commands: nothing to return now.
        r.router.send(credit_return={"tokens": 0})
        await r.router.heartbeat()
        r.router.send(heartbeat={})
        assert (await r.router.next("credit_reclaim")).tokens == 50
        r.router.send(credit_return={"tokens": 50})
        assert (await other.next("credit_grant")).tokens == 50


async def test_a_failing_step_ends_the_worker() -> None:
    network = KvNetwork()
    worker = make_prefill("prefill-0", 1, network)
    worker._engine.runner.fail_with = RuntimeError("device lost")
    steps = asyncio.create_task(worker.run())
    async with routing(worker, PrefillDown) as router:
        router.send(
            prefill={"attempt_id": A, "sequence": sequence([1, 2, 3]), "target": {}, "cost_tokens": 3}
        )
        with pytest.raises(RuntimeError, match="device lost"):
            async with asyncio.timeout(5):
                await steps


async def test_a_router_of_another_model_is_refused_by_name() -> None:
    worker = make_prefill("prefill-0", 1, KvNetwork())
    async with routing(worker, PrefillDown) as router:
        await router.leave()
    ours = common_pb2.Fingerprint()
    ours.CopyFrom(FINGERPRINT)
    ours.rope = "other"
    object.__setattr__(worker._identity, "fingerprint", ours)
    async with routing(worker, PrefillDown) as router:
        error = await router.refused()
    assert isinstance(error, IncompatiblePeer)
    assert error.field == "rope"
    assert worker._sessions == {}


async def test_a_second_hello_in_mid_session_ends_it() -> None:
    async with rig() as r:
        r.router.send(hello={})
        error = await r.router.refused()
        assert isinstance(error, PeerLost)
        assert "hello in mid-session" in str(error)
        assert r.nothing()
