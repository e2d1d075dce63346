"""Sends requests when they are due, whatever has become of the ones before.

Owns the clock of a window and the bounds on what is in flight. What answers is a Target.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from baton import AsyncClient
from baton.errors import BatonError
from benchmarks.attainment import Outcome
from benchmarks.workload import Planned

# Between the start of a window and the first moment that a request may be due: for the tasks to be made.
LEAD_S = 0.05
REFUSED_HERE = "IN_FLIGHT"
TIMED_OUT = "DEADLINE"


class Target(Protocol):
    """What requests are sent to."""

    def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        """Yields how many tokens have arrived, each time some do; raises BatonError if the request fails."""


class ClusterTarget:
    """A cluster's router, asked through the SDK."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        """One greedy answer that no stop token ends."""
        generation = self._client.generate(
            token_ids=request.token_ids,
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=timeout_s,
        )
        async for chunk in generation:
            if chunk.token_ids:
                yield len(chunk.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """max_in_flight: what is due beyond is not sent and counts as failed.

    deadline_s: a request ends so long after it was due, answered or not.
    """

    max_in_flight: int = 64
    deadline_s: float = 20.0


async def offer(target: Target, plan: Sequence[Planned], bounds: Bounds) -> list[Outcome]:
    """One window; returns, in the plan's order, once every request has ended."""
    began = asyncio.get_running_loop().time() + LEAD_S
    running: set[asyncio.Task[Outcome]] = set()
    outcomes: list[asyncio.Task[Outcome] | Outcome] = []
    try:
        for request in plan:
            due = began + request.at_s
            await _sleep_until(due)
            if len(running) >= bounds.max_in_flight:
                outcomes.append(_refused(request))
                continue
            task = asyncio.create_task(_ask(target, request, due, bounds.deadline_s))
            running.add(task)
            task.add_done_callback(running.discard)
            outcomes.append(task)
        return [outcome if isinstance(outcome, Outcome) else await outcome for outcome in outcomes]
    finally:
        for task in running:
            task.cancel()


async def _ask(target: Target, request: Planned, due: float, deadline_s: float) -> Outcome:
    loop = asyncio.get_running_loop()
    late_s = loop.time() - due
    token_s: list[float] = []
    failure = ""
    try:
        async with (
            asyncio.timeout_at(due + deadline_s),
            aclosing(target.answer(request, max(0.1, deadline_s - late_s))) as answer,
        ):
            async for num_tokens in answer:
                token_s += [loop.time() - due] * num_tokens
    except TimeoutError:
        failure = TIMED_OUT
    except BatonError as error:
        failure = error.code
    return Outcome(
        num_prompt_tokens=len(request.token_ids),
        max_tokens=request.max_tokens,
        token_s=tuple(token_s),
        late_s=late_s,
        failure=failure,
    )


def _refused(request: Planned) -> Outcome:
    return Outcome(
        num_prompt_tokens=len(request.token_ids), max_tokens=request.max_tokens, failure=REFUSED_HERE
    )


async def _sleep_until(moment: float) -> None:
    delay = moment - asyncio.get_running_loop().time()
    # Also when it is late: the answers must be heard.
    await asyncio.sleep(max(0.0, delay))
