"""Blocks that requests share, compute themselves, or give away."""

from __future__ import annotations

import pytest

from baton.sampling import Grammar
from baton.v1 import common_pb2
from tests.decode_worker.test_worker import KV, A, B, rig
from tests.fakes import expected_answer, until

LENGTH = common_pb2.FINISH_REASON_LENGTH
C = b"C" * 16


async def test_what_another_request_left_is_held_already() -> None:
    async with rig() as r:
        prompt = list(range(13))
        await r.prefill.push(A, await r.lease(A, prompt, max_tokens=2), prompt)
        await r.router.next("lease_outcome")
        await r.tokens(A, 2)
        await until(r.nothing)
        r.reserve(B, [*prompt, 50, 51], max_tokens=3)
        lease = (await r.router.next("reserve_result")).lease
        assert lease.num_held_tokens == 12
        await r.prefill.push(B, lease.lease_id, [*prompt, 50, 51], num_held_tokens=12)
        await r.router.next("lease_outcome")
        assert (await r.tokens(B, 3))[0] == expected_answer([*prompt, 50, 51], 3, KV)
        await until(r.nothing)


async def test_a_prompt_is_held_to_its_last_token_unless_every_token_is_to_be_scored() -> None:
    async with rig() as r:
        prompt = list(range(12))
        await r.prefill.push(A, await r.lease(A, prompt, max_tokens=2), prompt)
        await r.router.next("lease_outcome")
        await r.tokens(A, 2)
        await until(r.nothing)
        r.reserve(B, prompt)
        assert (await r.router.next("reserve_result")).lease.num_held_tokens == 12
        r.reserve(C, prompt, prompt_logprobs=0)
        assert (await r.router.next("reserve_result")).lease.num_held_tokens == 0


async def test_a_prompt_computed_here_needs_no_transfer() -> None:
    async with rig() as r:
        prompt = list(range(30))
        r.reserve(A, prompt, max_tokens=6, compute_locally=True)
        assert (await r.router.next("reserve_result")).HasField("lease")
        assert (await r.router.next("lease_outcome")).committed
        # 16 of 30 tokens are computed in a step that brings none.
        assert not (await r.router.next("step")).tokens
        await r.router.next("prompt_computed")
        assert await r.tokens(A, 6) == (expected_answer(prompt, 6, KV), LENGTH)
        await until(r.nothing)


async def test_the_youngest_gives_way_and_its_router_hears_of_it() -> None:
    async with rig(num_blocks=12) as r:
        prompts = {A: list(range(20)), B: list(range(40, 56))}
        for attempt_id, age_ms in ((A, 2_000), (B, 1_000)):
            prompt = prompts[attempt_id]
            r.reserve(attempt_id, prompt, max_tokens=20, age_ms=age_ms, compute_locally=True)
            assert (await r.router.next("reserve_result")).HasField("lease")
            assert (await r.router.next("lease_outcome")).committed
        got: dict[bytes, list[int]] = {A: [], B: []}
        preempted = None
        while len(got[A]) < 20:
            message = await r.router.any()
            if message.WhichOneof("message") == "preempted":
                preempted = message.preempted.attempt_id
            for event in message.step.tokens:
                got[event.attempt_id] += event.token_ids
        assert preempted == B
        assert got[A] == expected_answer(prompts[A], 20, KV)
        # What it had is right, and it is resumed with that.
        assert 0 < len(got[B]) < 20
        assert got[B] == expected_answer(prompts[B], len(got[B]), KV)
        await until(r.nothing)


@pytest.mark.parametrize("locally", [False, True], ids=["transferred", "computed here"])
async def test_a_request_that_cannot_join_after_its_commit_fails_and_leaves_nothing(locally: bool) -> None:
    # This worker was started without grammars.
    async with rig() as r:
        prompt = list(range(13))
        r.reserve(A, prompt, grammar=Grammar(kind="regex", source="a"), compute_locally=locally)
        lease = (await r.router.next("reserve_result")).lease
        if not locally:
            await r.prefill.push(A, lease.lease_id, prompt)
        assert (await r.router.next("lease_outcome")).committed
        if not locally:
            await r.router.next("step")
        failed = await r.router.next("failed")
        assert (failed.attempt_id, failed.failure.field) == (A, "grammar")
        await until(r.nothing)
        # The session goes on.
        assert await r.lease(B, prompt)
