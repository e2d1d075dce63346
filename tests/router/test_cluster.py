"""Router, prefill and decode shells together: answers are right, and afterwards nobody holds anything."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from baton.errors import DeadlineExceeded, Unavailable
from tests.cluster import Cluster, cluster
from tests.fakes import until


async def test_the_answer_is_that_of_the_tokens_alone() -> None:
    async with cluster() as c:
        runs = [c.stage.generate(num_prompt_tokens=n, max_tokens=9) for n in (1, 4, 5, 16, 17, 63)]
        for run in runs:
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_block_size_layout_and_dtype_may_differ() -> None:
    async with cluster(num_decode=0) as c:
        await c.decode("decode-0", block_size=6, layout="NHD", dtype=torch.bfloat16)
        runs = [c.stage.generate(num_prompt_tokens=n, max_tokens=9) for n in (3, 24, 50)]
        for run in runs:
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_the_first_token_does_not_wait_for_the_transfer() -> None:
    async with cluster() as c:
        c.network.may_commit.clear()
        run = c.stage.generate(num_prompt_tokens=20, max_tokens=3)
        await until(lambda: len(run.received()) == 1)
        await until(lambda: c.network.num_commits_waiting == 1)
        assert run.received() == c.expected(run)[:1]
        # The credit is free again; the blocks are not.
        ledger = c.workers["prefill-0"].ledger()
        assert (ledger["credit_spent_tokens"], ledger["blocks_used"], ledger["transfers"]) == (0, 5, 1)
        c.network.may_commit.set()
        assert await run.answer() == c.expected(run)
        await c.idle()


async def test_a_request_of_one_token_transfers_nothing() -> None:
    async with cluster() as c:
        run = c.stage.generate(num_prompt_tokens=16, max_tokens=1)
        assert await run.answer() == c.expected(run)
        await c.idle()
        assert c.workers["decode-0"].receiver.counters["frames"] == 0


async def stop_at_a_random_point(run: Any, rng: random.Random) -> None:
    for _ in range(rng.randrange(200)):
        await asyncio.sleep(0)
    run.task.cancel()
    await asyncio.wait([run.task])


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_many_requests_mixed_with_cancels_leave_every_ledger_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    async with cluster(num_prefill=2, num_decode=2) as c:
        before = c.ledgers()
        runs = [
            c.stage.generate(num_prompt_tokens=rng.randrange(1, 90), max_tokens=rng.randrange(1, 12))
            for _ in range(50)
        ]
        leaving = [runs[index] for index in rng.sample(range(50), 20)]
        await asyncio.gather(*(stop_at_a_random_point(run, rng) for run in leaving))
        for run in runs:
            if run in leaving:
                got = run.received()
                assert got == c.expected(run)[: len(got)]
            else:
                assert await run.answer() == c.expected(run)
        await until(lambda: c.ledgers() == before)
        free = [w._engine.pool.num_free for w in c.workers.values()]
        assert free == [64] * 4


@pytest.mark.parametrize("seed", [11, 12])
async def test_answers_survive_workers_that_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    async with cluster(num_prefill=2, num_decode=2, max_attempts=50, resume_wait_s=5.0) as c:
        runs = [
            c.stage.generate(num_prompt_tokens=rng.randrange(1, 90), max_tokens=rng.randrange(1, 25))
            for _ in range(40)
        ]
        for generation in range(6):
            for _ in range(rng.randrange(10, 80)):
                await asyncio.sleep(0)
            name = rng.choice(sorted(c.workers))
            await c.kill(name)
            role = name.split("-")[0]
            await (c.prefill if role == "prefill" else c.decode)(f"{role}-{generation + 2}")
        for run in runs:
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_a_decode_worker_killed_in_mid_answer_is_replaced_without_a_seam() -> None:
    async with cluster(num_decode=1) as c:
        run = c.stage.generate(num_prompt_tokens=30, max_tokens=40)
        await until(lambda: len(run.received()) >= 5)
        first = c.workers["decode-0"]
        await c.kill("decode-0")
        await c.decode("decode-1")
        assert await run.answer() == c.expected(run)
        await c.idle()
        # Its end of the session is gone, and with it all it held; its last step never ended.
        held = first.ledger()
        held.pop("blocks_fenced")
        assert not any(held.values())


async def test_a_prefill_worker_killed_in_mid_transfer_costs_no_token() -> None:
    async with cluster(num_prefill=1) as c:
        c.network.may_commit.clear()
        run = c.stage.generate(num_prompt_tokens=30, max_tokens=6)
        await until(lambda: c.network.num_commits_waiting == 1)
        assert len(run.received()) == 1
        await c.kill("prefill-0")
        await c.prefill("prefill-1")
        c.network.may_commit.set()
        assert await run.answer() == c.expected(run)
        assert run.generation._timeline.num_attempts == 2
        await c.idle()


async def test_a_broken_session_alone_disturbs_no_answer() -> None:
    async with cluster(max_attempts=20) as c:
        runs = [c.stage.generate(num_prompt_tokens=n, max_tokens=30) for n in (10, 50, 90)]
        for name in ("decode-0", "prefill-0", "decode-0"):
            for _ in range(60):
                await asyncio.sleep(0)
            c.stage.dialer.cut(name)
        for run in runs:
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_a_receiver_that_cannot_be_reached_is_a_failed_transfer() -> None:
    async with cluster(max_attempts=2) as c:
        c.network.receivers.clear()
        run = c.stage.generate(max_tokens=5)
        with pytest.raises(Unavailable, match="no prefill worker can reach a decode worker"):
            await run.answer()
        # The first attempt delivered its first token; nothing is placed on its pair until that is made anew.
        assert run.received() == c.expected(run)[:1]
        await c.idle()


async def test_a_request_whose_kv_never_arrives_ends_with_its_deadline() -> None:
    async with cluster() as c:
        c.network.may_commit.clear()
        parked = [c.stage.generate(num_prompt_tokens=20, max_tokens=5, timeout_s=0.4) for _ in range(8)]
        await until(lambda: c.network.num_commits_waiting == 8)
        c.network.may_commit.set()
        c.network.may_commit.clear()
        late = c.stage.generate(num_prompt_tokens=20, max_tokens=5, timeout_s=0.2)
        with pytest.raises(DeadlineExceeded):
            await late.answer()
        for run in parked:
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_more_requests_than_blocks_all_end_well() -> None:
    async with cluster(num_decode=0) as c:
        await c.decode("decode-0", num_blocks=12)
        runs = [c.stage.generate(num_prompt_tokens=30, max_tokens=10) for _ in range(20)]
        for run in runs:
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_prompts_beyond_all_credit_go_one_by_one() -> None:
    async with cluster(num_prefill=0) as c:
        await c.prefill("prefill-0", credit_tokens=50)
        runs = [c.stage.generate(num_prompt_tokens=120, max_tokens=3) for _ in range(4)]
        for run in runs:
            assert await run.answer() == c.expected(run)
        await c.idle()


async def test_a_prompt_that_no_prefill_worker_can_hold_is_refused_by_name() -> None:
    async with cluster(num_prefill=0, num_decode=0) as c:
        await c.prefill("prefill-0", num_blocks=4)
        await c.decode("decode-0", num_blocks=64)
        run = c.stage.generate(num_prompt_tokens=40, max_tokens=3)
        with pytest.raises(Exception, match="40 tokens; no prefill worker") as error:
            await run.answer()
        assert error.value.field == "prompt"  # type: ignore[attr-defined]
        await c.idle()


async def two_routers(c: Cluster, other: Cluster) -> None:
    """Lets a second router use the same workers."""
    other.network = c.network
    for name, worker in c.workers.items():
        other.stage.dialer.workers[name] = worker.serve
    for info in (link.info for link in c.stage.fleet.links):
        other.stage.registry.announce(info)
    await until(lambda: other.stage.fleet.is_complete)


async def test_two_routers_share_the_workers_and_neither_starves() -> None:
    async with cluster(max_attempts=1) as c, cluster(num_prefill=0, num_decode=0) as other:
        # The first router has spent all credit when the second one comes.
        early = [c.stage.generate(num_prompt_tokens=100, max_tokens=4) for _ in range(8)]
        await until(lambda: c.workers["prefill-0"].ledger()["credit_spent_tokens"] > 0)
        await two_routers(c, other)
        # Longer than a router's share of the credit.
        late = [s.generate(num_prompt_tokens=230, max_tokens=4) for s in (other.stage, c.stage) * 3]
        for run in early + late:
            assert await run.answer() == c.expected(run)
        await c.idle()
        await other.idle()
        (ours,), (theirs,) = c.stage.fleet.prefill_links(), other.stage.fleet.prefill_links()
        await until(lambda: (ours.credit, theirs.credit) == (200, 200))


async def test_a_router_that_dies_takes_its_requests_along() -> None:
    async with cluster() as c:
        c.network.may_commit.clear()
        c.stage.generate(num_prompt_tokens=30, max_tokens=6)
        c.stage.generate(num_prompt_tokens=30, max_tokens=6)
        await until(lambda: c.network.num_commits_waiting == 2)
        assert c.workers["decode-0"].ledger()["leases"] == 2
        for name in ("prefill-0", "decode-0"):
            c.stage.dialer.workers.pop(name)
            c.stage.registry.withdraw(name)
            c.stage.dialer.cut(name)
        await until(lambda: not any(any(w.ledger().values()) for w in c.workers.values()))
