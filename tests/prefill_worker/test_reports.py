"""What a prefill worker says about its steps, its load and its prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.prefix_keys import PrefixKeys
from prefill_worker.worker import PrefillWorker
from router.placing.prefix_map import PrefixMap
from router.placing.prompt_keys import PromptKeys
from tests.cluster import make_prefill
from tests.fakes import KvNetwork
from tests.played_router import PlayedRouter, PrefillDown, routing, sequence, stepping
from tests.timed_worker import note_cache, timed, virtually

A, B, C = b"A" * 16, b"B" * 16, b"C" * 16
SALT = b"tenant"


def prefill(router: PlayedRouter, attempt_id: bytes, prompt: list[int]) -> None:
    """One token is asked for, so nothing is transferred."""
    message = sequence(prompt, max_tokens=1)
    message.cache_salt = SALT
    command = {"attempt_id": attempt_id, "sequence": message, "target": {}, "cost_tokens": len(prompt)}
    router.send(prefill=command)


async def ended(router: PlayedRouter) -> Any:
    """The next attempt that ends."""
    while (message := await router.any()).WhichOneof("message") != "ended":
        pass
    return message.ended


def times_of(ended: Any) -> tuple[float, ...]:
    """wait, compute, total in ms; steps; tokens computed and cached."""
    p = ended.prefill
    times = tuple(round(ms, 6) for ms in (p.wait_ms, p.compute_ms, p.total_ms))
    return (*times, p.num_steps, p.num_computed_tokens, p.num_cached_tokens)


@virtually
async def test_prompts_computed_together_share_their_steps_by_tokens() -> None:
    async with timed(make_prefill("prefill-0", 1, KvNetwork()), PrefillDown, token_s=0.001) as router:
        prefill(router, A, list(range(20)))
        prefill(router, B, list(range(50, 80)))
        # 16 + 16 tokens, then 4 + 14: a millisecond each.
        assert times_of(await ended(router)) == (0, 20, 50, 2, 20, 0)
        assert times_of(await ended(router)) == (0, 30, 50, 2, 30, 0)
        # Five full blocks are known; the last token is always computed.
        prefill(router, C, list(range(20)))
        assert times_of(await ended(router)) == (0, 4, 4, 1, 4, 16)


@virtually
async def test_a_prompt_waits_until_the_first_step_that_computes_a_part_of_it() -> None:
    async with timed(make_prefill("prefill-0", 1, KvNetwork()), PrefillDown, token_s=0.01) as router:
        prefill(router, A, list(range(10)))
        await asyncio.sleep(0.03)
        prefill(router, B, list(range(50, 55)))
        assert times_of(await ended(router)) == (0, 100, 100, 1, 10, 0)
        assert times_of(await ended(router)) == (70, 50, 120, 1, 5, 0)


@virtually
async def test_a_prompt_that_came_to_no_token_has_no_total() -> None:
    async with timed(make_prefill("prefill-0", 1, KvNetwork()), PrefillDown, token_s=0.01) as router:
        prefill(router, A, list(range(40)))
        await asyncio.sleep(0.2)
        router.send(cancel={"attempt_id": A})
        cancelled = await ended(router)
        assert cancelled.cancelled
        # The first step has ended, the second has not.
        assert times_of(cancelled) == (0, 160, 0, 1, 16, 0)


@virtually
async def test_heartbeats_say_how_much_is_still_to_be_computed() -> None:
    async with timed(make_prefill("prefill-0", 1, KvNetwork()), PrefillDown, token_s=0.01) as router:
        prefill(router, A, list(range(20)))
        prefill(router, B, list(range(50, 80)))
        # At 0, 250 and 500 ms; the first step of 32 tokens ends at 320 ms, the second at 500.
        backlogs = [(await router.heartbeat()).num_backlog_tokens for _ in range(4)]
        assert (backlogs[0], backlogs[1], backlogs[3]) == (0, 50, 0)


async def test_the_capacity_states_what_a_step_can_take() -> None:
    async with routing(make_prefill("prefill-0", 1, KvNetwork()), PrefillDown) as router:
        await router.next("hello")
        capacity = await router.next("capacity")
        assert (capacity.chunk_tokens, capacity.max_batch_tokens) == (16, 64)


def held(worker: PrefillWorker, prompt: list[int]) -> int:
    """Leading tokens that the pool can find, from its own list of keys."""
    stored = {entry.key for entry in worker._engine.pool.stored()}
    keys = PrefixKeys(SALT, block_size=4).keys(prompt)
    return 4 * next((index for index, key in enumerate(keys) if key not in stored), len(keys))


@virtually
async def test_an_index_of_what_is_told_is_what_the_pool_holds() -> None:
    worker = make_prefill("prefill-0", 1, KvNetwork(), num_blocks=16)
    pool, index = worker._engine.pool, PrefixMap()
    # Three documents, each with several continuations: far more than 16 blocks.
    prompts = [[100 * d + n for n in range(12)] + [end] * 9 for end in range(4) for d in range(3)]
    async with timed(worker, PrefillDown, token_s=0.0001) as router:
        for number, prompt in enumerate([*prompts, *prompts[:4]]):
            prefill(router, number.to_bytes(16, "big"), prompt)
            assert (await ended(router)).finished
            router.send(heartbeat={})
            await note_cache(router, index, 1, 16)
            assert index.num_keys == len(pool.stored())
            found = [index.match(PromptKeys(p, SALT)).get(1, 0) for p in prompts]
            assert found == [held(worker, p) for p in prompts]
            assert max(found) == 20
        # One that comes late is told the same.
        late = PrefixMap()
        async with routing(worker, PrefillDown, "router-1") as other:
            await note_cache(other, late, 1, 16)
        assert (late.num_keys, late._masks.keys()) == (index.num_keys, index._masks.keys())
        pool.clear_cache()
        await note_cache(router, index, 1, 16)
        assert (index.num_keys, pool.stored()) == (0, [])


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_the_list_comes_right_after_the_capacity_if_there_is_a_prefix_cache(prefix_cache: bool) -> None:
    worker = make_prefill("prefill-0", 1, KvNetwork(), prefix_cache=prefix_cache)
    async with stepping(worker), routing(worker, PrefillDown) as router:
        prefill(router, A, list(range(20)))
        await ended(router)
        await router.heartbeat()
        sent = [message.WhichOneof("message") for message in router.session._other.sent]
    opening = ["hello", "capacity", "cache_changes", "credit_grant"]
    if not prefix_cache:
        opening.remove("cache_changes")
    assert [kind for kind in sent if kind != "heartbeat"][: len(opening)] == opening
    assert ("cache_changes" in sent) is prefix_cache
