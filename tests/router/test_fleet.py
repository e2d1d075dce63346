"""Links: opened for what is announced, kept when the registry forgets, redialled after a loss."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from baton.ports import WorkerInfo
from baton.v1 import common_pb2
from tests.fakes import FINGERPRINT, until
from tests.router.stage import Stage, staged


def take(prefill: Any, num_tokens: int) -> int:
    return prefill.take(  # type: ignore[no-any-return]
        b"x" * 16, num_tokens=num_tokens, num_uncached_tokens=num_tokens, seniority=0.0, predicted_ms=1.0
    )


def link(stage: Stage, name: str) -> object:
    return next(link for link in stage.fleet.links if link.name == name)


async def test_a_lost_session_is_dialled_again_while_the_worker_is_announced() -> None:
    async with staged() as stage:
        worker = await stage.decode()
        for number in range(2, 5):
            stage.dialer.cut("decode-0")
            await until(lambda number=number: worker.num_sessions == number)
            await until(lambda: link(stage, "decode-0").is_ready)
        assert worker.num_sessions == 4


class Pauses(random.Random):
    """Notes the longest pauses that were possible, and makes none."""

    def __init__(self) -> None:
        super().__init__(0)
        self.longest: list[float] = []

    def uniform(self, a: float, b: float) -> float:
        self.longest.append(b)
        return 0.0


async def test_pauses_grow_while_nobody_answers_and_start_over_after_a_session() -> None:
    async with staged() as stage:
        pauses = stage.fleet._rng = Pauses()
        worker = await stage.decode()
        del stage.dialer.workers["decode-0"]
        stage.dialer.cut("decode-0")
        await until(lambda: len(pauses.longest) >= 7)
        stage.dialer.workers["decode-0"] = worker.serve
        assert pauses.longest[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
        await until(lambda: worker.num_sessions == 2)
        pauses.longest.clear()
        stage.dialer.cut("decode-0")
        await until(lambda: worker.num_sessions == 3)
        assert pauses.longest == [0.1]


async def test_a_worker_that_died_is_forgotten_once_it_is_no_longer_announced() -> None:
    async with staged() as stage:
        await stage.decode("decode-0")
        await stage.decode("decode-1")
        stage.kill("decode-0")
        await until(lambda: [link.name for link in stage.fleet.links] == ["decode-1"])
        assert [link.name for link in stage.fleet.decode_links()] == ["decode-1"]


async def test_an_emptied_registry_harms_nobody() -> None:
    async with staged() as stage:
        await stage.decode()
        await stage.prefill()
        stage.registry.forget_all()
        run = stage.generate()
        # The session is what counts: the request is placed.
        await until(lambda: stage.held()["attempts"] == 1)
        assert not run.task.done()


async def test_a_link_whose_session_ended_is_not_ready() -> None:
    async with staged() as stage:
        await stage.decode()
        lost = link(stage, "decode-0")
        states: list[tuple[str, bool]] = []
        stage.fleet._on_change = lambda: states.append((lost.state, lost.is_ready))
        stage.dialer.cut("decode-0")
        await until(lambda: bool(states))
        assert states == [("lost", False)]


async def test_a_worker_of_another_model_is_refused_by_name_and_not_dialled_again() -> None:
    async with staged() as stage:
        worker = await stage.decode("decode-0")
        stage.kill("decode-0")
        other = common_pb2.Fingerprint()
        other.CopyFrom(FINGERPRINT)
        other.head_dim = 64
        worker.identity = replace(worker.identity, fingerprint=other, incarnation=50)
        stage.dialer.workers["decode-0"] = worker.serve
        stage.registry.announce(
            WorkerInfo(name="decode-0", role="decode", incarnation=50, address="memory:1")
        )
        await until(lambda: any(link.state == "refused" for link in stage.fleet.links))
        # The process that is gone may still be listed beside it.
        (refused,) = (link for link in stage.fleet.links if link.state == "refused")
        assert refused.reason.startswith("head_dim differs")
        assert refused.status().state == "refused"
        assert not refused.is_ready
        sessions = worker.num_sessions
        await asyncio.sleep(0.15)  # more than the first pause: time in which a redial would show
        assert worker.num_sessions == sessions


async def test_another_incarnation_at_the_same_name_is_another_worker() -> None:
    async with staged() as stage:
        first = await stage.decode("decode-0")
        stage.kill("decode-0")
        await until(lambda: stage.fleet.links == [])
        second = await stage.decode("decode-0")
        (only,) = stage.fleet.links
        assert only.info.incarnation == second.identity.incarnation != first.identity.incarnation


async def test_a_worker_that_answers_with_another_incarnation_is_not_used() -> None:
    async with staged() as stage:
        worker = await stage.decode("decode-0")
        stage.dialer.cut("decode-0")
        worker.identity = replace(worker.identity, incarnation=77)
        await until(lambda: link(stage, "decode-0").reason.endswith("has restarted since it registered"))
        assert not list(stage.fleet.decode_links())


async def test_reclaimed_credit_is_returned_as_far_as_it_is_unused() -> None:
    async with staged() as stage:
        worker = await stage.prefill(budget=100)
        worker.send(credit_reclaim={"tokens": 70})
        assert (await worker.command("credit_return")).tokens == 70
        worker.send(credit_reclaim={"tokens": 70})
        assert (await worker.command("credit_return")).tokens == 30
        assert link(stage, "prefill-0").credit == 0


async def test_what_another_router_is_granted_does_not_count_as_spent_here() -> None:
    async with staged() as stage:
        worker = await stage.prefill(budget=100)
        decode = await stage.decode()
        stage.generate(num_prompt_tokens=100)
        await decode.grant()
        command = await worker.command("prefill")
        assert link(stage, "prefill-0").spent == 100
        # The worker gives half of the freed credit to another router.
        worker.grant(50, share=50)
        worker.send(token=worker.token(command.attempt_id, 0, 7))
        await until(lambda: link(stage, "prefill-0").spent == 0)
        # A prompt longer than this router's share costs the share, and fits.
        assert link(stage, "prefill-0").objection(5000, 5000, seniority=0.0) == ""
        assert take(link(stage, "prefill-0"), 5000) == 50


async def test_a_worker_whose_step_is_stuck_is_lost_although_it_is_alive() -> None:
    async with staged() as stage:
        worker = await stage.decode("decode-0")
        before = link(stage, "decode-0")
        worker.send(heartbeat={"num_free_blocks": 64, "is_wedged": True})
        await until(lambda: before.state == "lost")
        assert "wedged" in before.reason
        # It still announces itself, so it is dialled again.
        await until(lambda: any(link.is_ready for link in stage.fleet.links))


async def test_a_worker_that_serves_and_cuts_kv_has_a_note() -> None:
    async with staged() as stage:
        worker = await stage.decode()
        (link,) = stage.fleet.links
        assert link.status().reason == ""
        worker.send(heartbeat={"num_free_blocks": worker.num_blocks, "num_saturated_values": 12})
        await until(lambda: link.status().reason != "")
        assert link.status().state == "ready"
        assert link.status().reason.startswith("12 values of KV exceeded its float16 cache")
