"""Sends requests when they are due, whatever has become of the ones before.

Owns the clock of a window and the bounds on what is in flight. What answers is a Target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from baton.bench.outcome import Outcome, Planned
from baton.bench.target import Bounds, Seen, Target, ask, unseen

# Between the start of a window and the first moment that a request may be due: for the tasks to be made.
LEAD_S = 0.05
REFUSED_HERE = "IN_FLIGHT"


async def offer(
    target: Target, plan: Iterable[Planned], bounds: Bounds, seen: Seen = unseen
) -> list[Outcome]:
    """One window; returns, in the plan's order, once every request has ended.

    plan: in order of time. It is read as requests are due, so it may be long.
    """
    began = asyncio.get_running_loop().time() + LEAD_S
    running: set[asyncio.Task[Outcome]] = set()
    outcomes: list[asyncio.Task[Outcome] | Outcome] = []
    try:
        for request in plan:
            due = began + request.at_s
            await _sleep_until(due)
            if len(running) >= bounds.max_in_flight:
                refused = _refused(request, bounds)
                outcomes.append(refused)
                seen(refused)
                continue
            asking = ask(target, request, began=began, due=due, deadline_s=bounds.deadline_s, seen=seen)
            task = asyncio.create_task(asking)
            running.add(task)
            task.add_done_callback(running.discard)
            outcomes.append(task)
        return [outcome if isinstance(outcome, Outcome) else await outcome for outcome in outcomes]
    finally:
        for task in running:
            task.cancel()


def _refused(request: Planned, bounds: Bounds) -> Outcome:
    return Outcome(
        num_prompt_tokens=len(request.token_ids),
        max_tokens=request.max_tokens,
        failure=REFUSED_HERE,
        detail=f"not sent: {bounds.max_in_flight} were in flight",
        due_s=request.at_s,
    )


async def _sleep_until(moment: float) -> None:
    delay = moment - asyncio.get_running_loop().time()
    # Also when it is late: the answers must be heard.
    await asyncio.sleep(max(0.0, delay))
