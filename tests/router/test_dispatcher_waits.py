"""Who waits for whom: nothing keeps others waiting that cannot be placed, has gone, or has just come back."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from baton.errors import Unavailable
from baton.prefix_keys import PrefixKeys
from baton.v1 import common_pb2
from router.assignment import Assignment, Wanted
from router.outlook import REVIEW_S, STALE_S
from router.placing.prompt_keys import PromptKeys
from tests.fakes import GUARD_S, until
from tests.router.stage import NOTHING, Stage, staged

IDS = (number.to_bytes(16, "big") for number in itertools.count(1))


def assign(stage: Stage, num_tokens: int, **more: Any) -> asyncio.Task[Assignment]:
    now = asyncio.get_running_loop().time()
    facts = {
        "kv_tokens": num_tokens + 60,
        "expected_tokens": num_tokens,
        "keys": None,
        "arrived_at": now,
        "due_at": now + 60.0,
    } | more
    wanted = Wanted(attempt_id=next(IDS), num_tokens=num_tokens, **facts)
    return asyncio.create_task(stage.dispatcher.assign(wanted))


async def result(task: asyncio.Task[Assignment]) -> Assignment:
    async with asyncio.timeout(GUARD_S):
        return await task


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_attempt_that_no_prefill_worker_can_ever_hold_is_told_and_keeps_nobody_waiting() -> None:
    async with staged(max_wait_s=0.0) as stage:
        await stage.prefill()
        await stage.decode(num_blocks=1000)
        stage.fleet.prefill_links()[0]._capacity.num_blocks = 20
        # A prompt that fitted, resumed with what it has generated since.
        outgrown = assign(stage, 321, is_new=False, arrived_at=0.0)
        with pytest.raises(Unavailable, match="prefill worker holds 321 tokens"):
            await result(outgrown)
        (await result(assign(stage, 100))).undo()
        assert stage.held() == NOTHING


async def test_where_decode_workers_may_compute_an_attempt_that_outgrew_the_prefill_workers_goes_on() -> None:
    async with staged(placement="auto", local_max_tokens=10) as stage:
        await stage.prefill()
        await stage.decode(num_blocks=1000)
        stage.fleet.prefill_links()[0]._capacity.num_blocks = 20
        resumed = await result(assign(stage, 321, is_new=False))
        assert resumed.prefill is None
        assert (await result(assign(stage, 100))).prefill is not None


async def test_when_what_blocked_the_line_is_cancelled_the_next_is_placed_at_once() -> None:
    async with staged(max_wait_s=0.0) as stage:
        await stage.prefill(budget=1000)
        await stage.decode(num_blocks=1000)
        held = await result(assign(stage, 700))
        # Overdue at once, it would need more credit than is left; nothing younger may pass.
        blocker, behind = assign(stage, 600), assign(stage, 50)
        await turns()
        assert not behind.done()
        blocker.cancel()
        # Nothing else happens: no heartbeat, no credit.
        await turns()
        assert behind.done()
        (await behind).undo()
        held.undo()


async def test_a_reservation_that_takes_fewer_blocks_than_asked_lets_the_next_one_in() -> None:
    async with staged() as stage:
        await stage.prefill()
        decode = await stage.decode(num_blocks=20)
        link = stage.fleet.decode_links()[0]
        first = await result(assign(stage, 170, kv_tokens=176, expected_tokens=170))
        link._inboxes[first.attempt_id] = _Silent()
        # 11 of 20 blocks are asked for.
        waiting = assign(stage, 200, kv_tokens=208, expected_tokens=200)
        await turns()
        assert not waiting.done()
        # Nine of them were there already: the worker's word is less than before, and yet there is more room.
        decode.send(
            reserve_result={
                "attempt_id": first.attempt_id,
                "lease": {"lease_id": b"L"},
                "num_free_blocks": 19,
            }
        )
        assert (await result(waiting)).decode is link


class _Silent:
    def put(self, event: object) -> None:
        del event


async def test_what_comes_back_keeps_its_deadline_and_does_not_count_as_having_waited() -> None:
    async with staged(max_wait_s=5.0) as stage:
        await stage.prefill(budget=1000)
        await stage.decode(num_blocks=1000)
        held = await result(assign(stage, 700))
        now = asyncio.get_running_loop().time()
        back = assign(stage, 600, is_new=False, arrived_at=now - 60, due_at=now - 59)
        # There is no room for it yet. It ran for a minute and has waited for no time.
        small = await result(assign(stage, 50, priority=common_pb2.PRIORITY_HIGH))
        assert not back.done()
        younger = assign(stage, 600)
        held.undo()
        assert (await result(back)).cost == 600
        assert not younger.done()
        small.undo()
        younger.cancel()


async def test_a_prompt_cached_where_there_is_room_is_not_kept_back_by_one_cached_where_there_is_none() -> (
    None
):
    async with staged() as stage:
        full = await stage.prefill("prefill-0", budget=1000)
        free = await stage.prefill("prefill-1", budget=1000)
        await stage.decode(num_blocks=1000)
        links = {link.name: link for link in stage.fleet.prefill_links()}
        links["prefill-0"].credit, links["prefill-1"].credit = 0, 500
        first, second = list(range(900)), list(range(5000, 5900))
        _hold(full, first[:896])
        _hold(free, second[:640])
        await until(lambda: stage.core.outlook.prefixes.num_keys == 96)
        # Both have the same to compute where most of it is cached, but for the first that worker is full.
        hers = assign(stage, 900, keys=PromptKeys(first), due_at=0.0)
        his = assign(stage, 900, keys=PromptKeys(second))
        assert (await result(his)).prefill is links["prefill-1"]
        assert not hers.done()
        hers.cancel()


def _hold(worker: Any, token_ids: list[int]) -> None:
    keys = PrefixKeys(b"", block_size=16).keys(token_ids)
    worker.send(cache_changes=common_pb2.CacheChanges(reset=True, stored=b"".join(keys)))


async def test_an_idle_worker_that_was_slow_once_counts_as_typical_again_and_a_busy_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with staged() as stage:
        for name in ("prefill-0", "prefill-1", "prefill-2"):
            await stage.prefill(name)
        await stage.decode(num_blocks=1000)
        outlook, links = stage.core.outlook, stage.fleet.prefill_links()
        for link, compute_ms in zip(links, (100.0, 900.0, 900.0), strict=True):
            for _ in range(20):
                times = common_pb2.PrefillTimes(total_ms=1.0, num_computed_tokens=100, compute_ms=compute_ms)
                outlook.computed(link, times)
        fast, idle, busy = (link.incarnation for link in links)
        links[2]._inboxes[b"busy"] = _Silent()  # type: ignore[assignment]
        later = asyncio.get_running_loop().time() + STALE_S + REVIEW_S + 1
        monkeypatch.setattr("router.outlook._now", lambda: later)
        before = outlook.costs.prefill_ms(idle, 100, 0)
        assert before > 5 * outlook.costs.prefill_ms(fast, 100, 0)
        links[0]._inboxes[b"busy"] = _Silent()  # type: ignore[assignment]
        outlook.review(links, stage.fleet.decode_links())
        assert outlook.costs.prefill_ms(idle, 100, 0) < 0.7 * before
        assert outlook.costs.prefill_ms(busy, 100, 0) == pytest.approx(before, rel=0.1)
        for link in links:
            link._inboxes.clear()
