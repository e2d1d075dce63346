"""What requests are sent to, and how one is sent and timed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from baton.bench.outcome import Outcome, Planned
from baton.errors import BatonError

TIMED_OUT = "DEADLINE"
# What a target still hears of a deadline that has passed already.
_SHORTEST_TIMEOUT_S = 0.1

Seen = Callable[[Outcome], None]


class Target(Protocol):
    """What requests are sent to."""

    def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        """Yields how many tokens have arrived, each time some do; raises BatonError if the request fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """max_in_flight: in an open loop, what is due beyond is not sent and counts as failed.

    deadline_s: a request ends so long after it was due, answered or not.
    """

    max_in_flight: int = 64
    deadline_s: float = 20.0


def unseen(_outcome: Outcome) -> None:
    """Where nobody watches."""


async def ask(
    target: Target, request: Planned, *, began: float, due: float, deadline_s: float, seen: Seen
) -> Outcome:
    """One request, from now to its end; its clock starts when it was due.

    began, due: moments of the loop's clock. seen: told of the outcome at once.
    """
    loop = asyncio.get_running_loop()
    late_s = loop.time() - due
    token_s: list[float] = []
    failure = detail = ""
    try:
        async with (
            asyncio.timeout_at(due + deadline_s),
            aclosing(target.answer(request, max(_SHORTEST_TIMEOUT_S, deadline_s - late_s))) as answer,
        ):
            async for num_tokens in answer:
                token_s += [loop.time() - due] * num_tokens
    except TimeoutError:
        failure, detail = TIMED_OUT, f"not answered within {deadline_s:g} s"
    except BatonError as error:
        failure, detail = error.code, error.message
    outcome = Outcome(
        num_prompt_tokens=len(request.token_ids),
        max_tokens=request.max_tokens,
        token_s=tuple(token_s),
        late_s=late_s,
        failure=failure,
        detail=detail,
        due_s=due - began,
    )
    seen(outcome)
    return outcome
