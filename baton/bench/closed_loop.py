"""So many callers, each of whom sends the next request when the one before has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from baton.bench.outcome import Outcome, Planned
from baton.bench.target import Seen, Target, ask, unseen

# After a failure a caller waits so long, or a cluster that refuses everything would be asked without end.
PAUSE_S = 0.05


async def repeat(
    target: Target,
    requests: Iterator[Planned],
    *,
    concurrency: int,
    deadline_s: float,
    seconds: float | None = None,
    seen: Seen = unseen,
) -> list[Outcome]:
    """The outcomes, in the order of their ends, once all requests have been sent and have ended.

    seconds: no request is sent after so long; those under way are waited for.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcomes: list[Outcome] = []

    async def call() -> None:
        # One at a time, so a generator serves all callers.
        for request in requests:
            outcome = await ask(
                target, request, began=began, due=loop.time(), deadline_s=deadline_s, seen=seen
            )
            outcomes.append(outcome)
            if outcome.failure:
                await asyncio.sleep(PAUSE_S)
            if seconds is not None and loop.time() - began >= seconds:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(call())
    return outcomes
