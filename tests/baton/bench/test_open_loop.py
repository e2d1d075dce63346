"""Open-loop load on virtual time: nobody waits for a slow answer, and every wait is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import pytest

from baton.bench.open_loop import REFUSED_HERE, offer
from baton.bench.outcome import Outcome, Planned
from baton.bench.target import TIMED_OUT, Bounds
from baton.errors import Overloaded
from tests.simulation.virtual_loop import VirtualLoop


class SlowTarget:
    """Answers one request at a time: the first token after prefill_s, the others every 0.1 s."""

    def __init__(self, prefill_s: float) -> None:
        self.prefill_s = prefill_s
        self.sent_at: list[float] = []
        self.left = 0
        self._turn = asyncio.Lock()

    async def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        self.sent_at.append(asyncio.get_running_loop().time())
        try:
            if len(request.token_ids) > 1000:
                raise Overloaded("too long")
            async with self._turn:
                await asyncio.sleep(self.prefill_s)
                yield 1
                for _ in range(request.max_tokens - 1):
                    await asyncio.sleep(0.1)
                    yield 1
        finally:
            self.left += 1


def plan(times: Iterable[float], num_tokens: int = 3, max_tokens: int = 1) -> list[Planned]:
    return [Planned(at_s=at_s, token_ids=(7,) * num_tokens, max_tokens=max_tokens) for at_s in times]


def offered(target: SlowTarget, requests: list[Planned], **bounds: float) -> list[Outcome]:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(offer(target, requests, Bounds(**bounds)))  # type: ignore[arg-type]
    finally:
        loop.close()


def test_requests_are_sent_when_due_however_slow_the_answers() -> None:
    target = SlowTarget(prefill_s=1.0)

    outcomes = offered(target, plan([0.0, 0.5, 1.0]))

    began = target.sent_at[0]
    assert [at - began for at in target.sent_at] == pytest.approx([0.0, 0.5, 1.0])
    # The queue grows by half a second each: that is what a closed loop would hide.
    assert [outcome.ttft_s for outcome in outcomes] == pytest.approx([1.0, 1.5, 2.0])
    assert all(outcome.is_complete for outcome in outcomes)


def test_every_token_has_its_time() -> None:
    (outcome,) = offered(SlowTarget(prefill_s=1.0), plan([0.0], max_tokens=4))

    assert outcome.token_s == pytest.approx((1.0, 1.1, 1.2, 1.3))
    assert outcome.mean_itl_s == pytest.approx(0.1)


def test_a_deadline_counts_from_when_a_request_was_due() -> None:
    target = SlowTarget(prefill_s=1.0)

    outcomes = offered(target, plan([0.0, 0.2], max_tokens=3), deadline_s=1.5)

    assert [outcome.failure for outcome in outcomes] == ["", TIMED_OUT]
    assert (outcomes[1].token_s, outcomes[1].is_complete) == ((), False)
    assert target.left == 2


def test_more_than_the_bound_is_not_sent_and_counts() -> None:
    target = SlowTarget(prefill_s=1.0)

    outcomes = offered(target, plan([0.0, 0.1, 0.2, 5.0]), max_in_flight=2)

    assert [outcome.failure for outcome in outcomes] == ["", "", REFUSED_HERE, ""]
    assert len(target.sent_at) == 3


def test_an_error_is_an_outcome() -> None:
    (outcome,) = offered(SlowTarget(prefill_s=1.0), plan([0.0], num_tokens=1001))

    assert (outcome.failure, outcome.num_prompt_tokens) == ("OVERLOADED", 1001)


def test_whoever_gives_up_the_window_leaves_nothing_behind() -> None:
    target = SlowTarget(prefill_s=10.0)

    async def run() -> None:
        window = asyncio.create_task(offer(target, plan([0.0, 0.0, 30.0]), Bounds()))
        await asyncio.sleep(1.0)
        window.cancel()
        await asyncio.wait([window])

    loop = VirtualLoop()
    loop.run_until_complete(run())
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()
    assert target.left == 2
