"""Closed-loop load on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from itertools import islice
from itertools import repeat as endless

import pytest

from baton.bench.closed_loop import PAUSE_S, repeat
from baton.bench.outcome import Outcome, Planned
from baton.errors import Overloaded
from tests.simulation.virtual_loop import VirtualLoop

REQUEST = Planned(at_s=0.0, token_ids=(7, 8), max_tokens=1)


class Target:
    """Answers each request after a second, however many there are; or refuses."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.in_flight = 0
        self.most_in_flight = 0
        self.sent_at: list[float] = []

    async def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        self.sent_at.append(asyncio.get_running_loop().time())
        if self.refuses:
            raise Overloaded("full")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(1.0)
        self.in_flight -= 1
        yield 1


def repeated(target: Target, requests: Iterator[Planned], **options: float) -> list[Outcome]:
    loop = VirtualLoop()
    try:
        work = repeat(target, requests, deadline_s=20.0, **options)  # type: ignore[arg-type]
        return loop.run_until_complete(work)
    finally:
        loop.close()


def test_callers_wait_for_their_answers() -> None:
    target = Target()
    outcomes = repeated(target, islice(endless(REQUEST), 10), concurrency=3)
    assert target.most_in_flight == 3
    began = target.sent_at[0]
    # Three at a time: four rounds of a second.
    assert [at - began for at in target.sent_at] == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    assert [outcome.ttft_s for outcome in outcomes] == pytest.approx([1.0] * 10)
    assert [outcome.due_s for outcome in outcomes] == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])


def test_after_the_time_nothing_is_sent_and_what_is_under_way_ends() -> None:
    outcomes = repeated(Target(), endless(REQUEST), concurrency=2, seconds=2.5)
    assert len(outcomes) == 6
    assert all(outcome.is_complete for outcome in outcomes)


def test_a_cluster_that_refuses_is_not_asked_without_end() -> None:
    target = Target(refuses=True)
    outcomes = repeated(target, endless(REQUEST), concurrency=1, seconds=1.0)
    assert len(outcomes) == pytest.approx(1.0 / PAUSE_S, abs=2)
    assert {outcome.failure for outcome in outcomes} == {"OVERLOADED"}


def test_whoever_watches_sees_each_outcome_when_it_ends() -> None:
    seen: list[Outcome] = []
    loop = VirtualLoop()
    loop.run_until_complete(
        repeat(Target(), islice(endless(REQUEST), 4), concurrency=2, deadline_s=9.0, seen=seen.append)
    )
    loop.close()
    assert len(seen) == 4
