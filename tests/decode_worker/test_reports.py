"""What a decode worker says about its steps, the prompts it computes itself, and its prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.prefix_keys import PrefixKeys
from router.placing.prefix_map import PrefixMap
from tests.cluster import make_decode
from tests.decode_worker.test_worker import rig
from tests.fakes import KvNetwork
from tests.played_router import DecodeDown, PlayedRouter, routing, sequence
from tests.timed_worker import note_cache, timed, virtually

A, B = b"A" * 16, b"B" * 16


def compute(router: PlayedRouter, attempt_id: bytes, prompt: list[int], *, max_tokens: int) -> None:
    message = sequence(prompt, max_tokens=max_tokens)
    router.send(reserve={"attempt_id": attempt_id, "sequence": message, "compute_locally": True})


def load_of(step: Any) -> tuple[float, int, int, int]:
    """Duration in ms, requests that decoded, their tokens in the cache, prompt tokens beside them."""
    load = step.load
    return round(load.duration_ms, 6), load.num_decoding, load.num_context_tokens, load.num_prompt_tokens


def times_of(computed: Any) -> tuple[float, ...]:
    """wait, compute, total in ms; steps; tokens computed and cached."""
    p = computed.prefill
    times = tuple(round(ms, 6) for ms in (p.wait_ms, p.compute_ms, p.total_ms))
    return (*times, p.num_steps, p.num_computed_tokens, p.num_cached_tokens)


async def opened(router: PlayedRouter, *attempt_ids: bytes) -> None:
    for attempt_id in attempt_ids:
        result = await router.next("reserve_result")
        assert (result.attempt_id, result.HasField("lease")) == (attempt_id, True)
        assert (await router.next("lease_outcome")).committed


@virtually
async def test_a_prompt_computed_here_is_told_before_its_first_token() -> None:
    async with timed(make_decode("decode-0", 2, KvNetwork()), DecodeDown, token_s=0.01) as router:
        await router.next("hello")
        await router.next("capacity")
        compute(router, A, list(range(20)), max_tokens=3)
        await opened(router, A)
        # A step that brought no token says what it cost all the same.
        first = await router.next("step")
        assert (load_of(first), len(first.tokens)) == ((160, 0, 0, 16), 0)
        computed = await router.next("prompt_computed")
        assert computed.attempt_id == A
        # 16 tokens, then 4.
        assert times_of(computed) == (0, 200, 200, 2, 20, 0)
        steps = [await router.next("step") for _ in range(3)]
        assert [load_of(step) for step in steps] == [(40, 0, 0, 4), (10, 1, 21, 0), (10, 1, 22, 0)]
        # Again: five blocks are known, and the last token is computed all the same.
        compute(router, B, list(range(20)), max_tokens=1)
        await opened(router, B)
        assert times_of(await router.next("prompt_computed")) == (0, 40, 40, 1, 4, 16)


@virtually
async def test_a_step_says_who_decoded_and_what_was_computed_beside() -> None:
    async with timed(make_decode("decode-0", 2, KvNetwork()), DecodeDown, token_s=0.01) as router:
        await router.next("hello")
        await router.next("capacity")
        compute(router, A, list(range(16)), max_tokens=5)
        await opened(router, A)
        await router.next("prompt_computed")
        await router.next("step")
        # 4 ms into the step of A's second token.
        await asyncio.sleep(0.004)
        compute(router, B, list(range(50, 58)), max_tokens=1)
        await opened(router, B)
        assert load_of(await router.next("step")) == (10, 1, 17, 0)
        computed = await router.next("prompt_computed")
        # Eight ninths of a step of 90 ms, which began 6 ms after the command came.
        assert times_of(computed) == (6, 80, 96, 1, 8, 0)
        assert load_of(await router.next("step")) == (90, 1, 18, 8)
        assert load_of(await router.next("step")) == (10, 1, 19, 0)


async def test_a_token_that_was_sampled_elsewhere_comes_without_a_step() -> None:
    async with rig() as r:
        prompt = list(range(13))
        await r.prefill.push(A, await r.lease(A, prompt, max_tokens=3), prompt)
        await r.router.next("lease_outcome")
        assert not (await r.router.next("step")).HasField("load")
        load = (await r.router.next("step")).load
        assert (load.num_decoding, load.num_context_tokens, load.num_prompt_tokens) == (1, 14, 0)
        assert load.duration_ms > 0


@virtually
async def test_heartbeats_say_what_is_cached_and_what_is_still_to_be_computed() -> None:
    async with timed(make_decode("decode-0", 2, KvNetwork()), DecodeDown, token_s=0.011) as router:
        compute(router, A, list(range(30)), max_tokens=40)
        first, second, third = [await router.heartbeat() for _ in range(3)]
        assert (first.num_context_tokens, first.num_backlog_tokens) == (0, 0)
        # At 250 ms one step of 176 ms has computed 16 tokens.
        assert (second.num_context_tokens, second.num_backlog_tokens) == (16, 14)
        # At 500 ms the prompt's 330 ms are over, and 15 steps of 11 ms.
        assert (third.num_context_tokens, third.num_backlog_tokens) == (45, 0)


async def test_the_capacity_states_what_a_step_can_take() -> None:
    async with routing(make_decode("decode-0", 2, KvNetwork()), DecodeDown) as router:
        await router.next("hello")
        capacity = await router.next("capacity")
        assert (capacity.chunk_tokens, capacity.max_batch_tokens) == (16, 64)
        # mixed_tokens as it is unless configured.
        assert (capacity.mixed_tokens, capacity.max_running) == (64, 32)


@virtually
async def test_an_index_of_what_is_told_is_what_the_pool_holds() -> None:
    worker = make_decode("decode-0", 2, KvNetwork(), num_blocks=12)
    pool, index = worker._engine.pool, PrefixMap()
    async with timed(worker, DecodeDown, token_s=0.0001) as router:
        await router.next("hello")
        await router.next("capacity")
        compute(router, A, list(range(20)), max_tokens=6)
        await opened(router, A)
        for _ in range(7):
            await router.any()
        await note_cache(router, index, 2, 12)
        # 25 tokens have been computed, those of the answer among them.
        assert index.num_keys == len(pool.stored()) == 6
        # A reservation evicts, with no step after it.
        router.send(reserve={"attempt_id": B, "sequence": sequence(list(range(50, 79)), max_tokens=2)})
        assert (await router.next("reserve_result")).HasField("lease")
        await note_cache(router, index, 2, 12)
        assert index.num_keys == len(pool.stored()) == 4
        keys = PrefixKeys(b"", block_size=4).keys(list(range(20)))
        assert index._masks.keys() == {entry.key for entry in pool.stored()} == set(keys[:4])
