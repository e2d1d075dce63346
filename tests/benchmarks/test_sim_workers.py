"""Simulated workers keep the session protocol: a router that a test plays gets what real workers say."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.identity import Identity
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from benchmarks.sim_costs import SimCosts, SimSizes
from benchmarks.sim_decode import SimDecode
from benchmarks.sim_prefill import SimPrefill
from tests.fakes import FINGERPRINT, until
from tests.played_router import DecodeDown, PlayedRouter, PrefillDown, routing, sequence, stepping

A, B = b"A" * 16, b"B" * 16
FREE = SimCosts()
OPENING = ("hello", "capacity")


def decode_worker(**sizes: int) -> SimDecode:
    identity = Identity(name="decode-0", role=common_pb2.ROLE_DECODE, incarnation=7, fingerprint=FINGERPRINT)
    return SimDecode(identity, sizes=SimSizes(**sizes), rng=random.Random(0))


def prefill_worker(*decodes: SimDecode, costs: SimCosts = FREE, **sizes: int) -> SimPrefill:
    identity = Identity(
        name="prefill-0", role=common_pb2.ROLE_PREFILL, incarnation=5, fingerprint=FINGERPRINT
    )
    known = {decode.identity.incarnation: decode for decode in decodes}
    return SimPrefill(identity, known, costs=costs, sizes=SimSizes(**sizes))


@asynccontextmanager
async def routed(worker: Any, down: Any) -> AsyncIterator[PlayedRouter]:
    async with stepping(worker), routing(worker, down) as router:
        for kind in OPENING:
            await router.next(kind)
        yield router


def reserve(attempt_id: bytes, num_prompt_tokens: int, **options: Any) -> decode_service_pb2.ReserveCommand:
    compute_locally = options.pop("compute_locally", False)
    return decode_service_pb2.ReserveCommand(
        attempt_id=attempt_id,
        sequence=sequence(range(num_prompt_tokens), **options),
        compute_locally=compute_locally,
    )


def prefill(
    attempt_id: bytes, num_tokens: int, lease_id: bytes = b"", incarnation: int = 7, **options: Any
) -> prefill_service_pb2.PrefillCommand:
    target = prefill_service_pb2.TransferTarget(lease_id=lease_id, worker="decode-0", incarnation=incarnation)
    return prefill_service_pb2.PrefillCommand(
        attempt_id=attempt_id,
        sequence=sequence(range(num_tokens), **options),
        target=target,
        cost_tokens=num_tokens,
    )


async def both_committed(
    decode: SimDecode, down: PlayedRouter, num_prompt_tokens: int, *, max_tokens: int
) -> None:
    """A and B, in this order, decode from the same step on."""
    leases = []
    for attempt_id in (A, B):
        down.send(reserve=reserve(attempt_id, num_prompt_tokens, max_tokens=max_tokens))
        leases.append((await down.next("reserve_result")).lease.lease_id)
    for attempt_id, lease_id in zip((A, B), leases, strict=True):
        first_token = common_pb2.TokenEvent(attempt_id=attempt_id, token_ids=[1])
        assert decode.commit(lease_id, first_token) is None


async def test_a_request_goes_from_one_to_the_other() -> None:
    decode = decode_worker(block_size=4, num_blocks=10)
    worker = prefill_worker(decode, credit_tokens=100, chunk_tokens=4)
    async with routed(decode, DecodeDown) as down, routed(worker, PrefillDown) as up:
        assert (await up.next("credit_grant")).tokens == 100
        down.send(reserve=reserve(A, 7, max_tokens=3))
        result = await down.next("reserve_result")
        # 7 tokens and the next one need 2 blocks of 4.
        assert result.num_free_blocks == 8
        up.send(prefill=prefill(A, 7, result.lease.lease_id, max_tokens=3))
        restored, token, ended = await up.any(), await up.next("token"), await up.next("ended")
        assert restored.credit_grant.tokens == 7
        assert (token.start_index, len(token.token_ids), token.finish_reason) == (0, 1, 0)
        assert ended.committed
        # Chunks of 4 and 3.
        assert (ended.prefill.num_steps, ended.prefill.num_computed_tokens) == (2, 7)
        assert (await down.next("lease_outcome")).committed
        events = [(await down.next("step")).tokens[0] for _ in range(3)]
        assert [event.start_index for event in events] == [0, 1, 2]
        assert list(events[0].token_ids) == list(token.token_ids)
        assert [event.finish_reason for event in events] == [0, 0, common_pb2.FINISH_REASON_LENGTH]
        assert (decode.num_attempts, decode.num_used_blocks, worker.num_attempts) == (0, 0, 0)


async def test_one_message_carries_a_step_for_all_requests() -> None:
    decode = decode_worker()
    async with routed(decode, DecodeDown) as down:
        await both_committed(decode, down, 8, max_tokens=3)
        for _ in range(2):
            assert (await down.next("lease_outcome")).committed
            assert not (await down.next("step")).HasField("load")
        for index in (1, 2):
            step = await down.next("step")
            assert [(event.attempt_id, event.start_index) for event in step.tokens] == [
                (A, index),
                (B, index),
            ]
            # 8 tokens of each prompt, and those that the answers had before the step.
            assert (step.load.num_decoding, step.load.num_context_tokens) == (2, 2 * (8 + index))


async def test_the_first_token_ends_a_request_of_one() -> None:
    decode = decode_worker()
    async with routed(prefill_worker(decode, credit_tokens=9), PrefillDown) as up:
        await up.next("credit_grant")
        up.send(prefill=prefill(A, 9, max_tokens=1))
        await up.next("credit_grant")
        assert (await up.next("token")).finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (await up.next("ended")).finished


async def test_a_prompt_can_be_computed_by_the_decode_worker() -> None:
    decode = decode_worker(chunk_tokens=4)
    async with routed(decode, DecodeDown) as down:
        down.send(reserve=reserve(A, 10, max_tokens=2, compute_locally=True))
        await down.next("reserve_result")
        assert (await down.next("lease_outcome")).committed
        computed = await down.next("prompt_computed")
        # Chunks of 4, 4 and 2.
        assert (computed.prefill.num_steps, computed.prefill.num_computed_tokens) == (3, 10)
        events = [(await down.next("step")).tokens[0] for _ in range(2)]
        assert [event.start_index for event in events] == [0, 1]
        assert events[1].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_full_decode_worker_refuses() -> None:
    async with routed(decode_worker(block_size=4, num_blocks=3), DecodeDown) as down:
        down.send(reserve=reserve(A, 7))
        assert (await down.next("reserve_result")).HasField("lease")
        down.send(reserve=reserve(B, 7))
        refused = await down.next("reserve_result")
        assert refused.refusal.failure.code == "OVERLOADED"
        assert refused.num_free_blocks == 1
        down.send(release=decode_service_pb2.ReleaseCommand(attempt_id=A))
        down.send(reserve=reserve(B, 7))
        assert (await down.next("reserve_result")).HasField("lease")


async def test_the_youngest_gives_way_where_blocks_run_out() -> None:
    decode = decode_worker(block_size=4, num_blocks=4)
    async with routed(decode, DecodeDown) as down:
        # 7 tokens and the next one: 2 blocks each, and none is left.
        await both_committed(decode, down, 7, max_tokens=5)
        messages = [await down.any() for _ in range(8)]
        preempted = [m.preempted.attempt_id for m in messages if m.WhichOneof("message") == "preempted"]
        assert preempted == [B]
        await until(lambda: decode.num_attempts == 0)
        assert decode.num_used_blocks == 0


async def test_a_session_that_ends_takes_its_attempts_along() -> None:
    decode = decode_worker()
    slow = SimCosts(prefill_step_ms=60_000.0)
    worker = prefill_worker(decode, costs=slow)
    async with routed(decode, DecodeDown) as down, routed(worker, PrefillDown) as up:
        down.send(reserve=reserve(A, 7))
        await down.next("reserve_result")
        up.send(prefill=prefill(A, 7))
        await until(lambda: worker.num_attempts == 1)
        await up.leave()
        await down.leave()
        assert (decode.num_attempts, decode.num_used_blocks, worker.num_attempts) == (0, 0, 0)


async def test_it_reaches_the_decode_workers_of_its_process_only() -> None:
    async with routed(prefill_worker(decode_worker()), PrefillDown) as up:
        await up.next("credit_grant")
        up.send(pair=prefill_service_pb2.PairCommand(worker="decode-0", incarnation=7, address="a:1"))
        assert (await up.next("pair_status")).transport == "shm"
        up.send(pair=prefill_service_pb2.PairCommand(worker="decode-1", incarnation=8, address="b:1"))
        assert (await up.next("pair_status")).failure.code == "PEER_LOST"
        up.send(prefill=prefill(A, 3, incarnation=8))
        kinds = [(await up.any()).WhichOneof("message") for _ in range(2)]
        assert kinds == ["credit_grant", "token"]
        assert (await up.next("ended")).failure.code == "KV_TRANSFER_FAILED"


def test_a_step_costs_what_is_in_it() -> None:
    costs = SimCosts(prefill_step_ms=2.0, prefill_token_ms=0.5, decode_step_ms=10.0, decode_request_ms=1.5)
    assert costs.step_ms(8, 0) == 6.0
    assert costs.step_ms(0, 4) == 16.0
    assert costs.step_ms(8, 4) == 22.0
    assert costs.step_ms(0, 0) == 0.0
