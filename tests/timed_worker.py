"""A worker whose steps take a stated time, on a clock that jumps: what it measures can be predicted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from router.placing.prefix_map import PrefixMap
from tests.played_router import PlayedRouter, routing, stepping
from tests.simulation.steps import SimStepRunner
from tests.simulation.virtual_loop import VirtualLoop


def virtually(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs an asynchronous test on virtual time."""

    def run() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test())
        finally:
            loop.close()
        assert loop.errors == []

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynccontextmanager
async def timed(worker: Any, down: Any, *, token_s: float) -> AsyncIterator[PlayedRouter]:
    """A session with a worker whose steps take token_s per token; what opens it is still to be read.

    It lives for two seconds: the router that a test plays says nothing unless the test lets it.
    """
    worker._steps._runner = SimStepRunner(
        worker._engine.cache, lambda batch: token_s * batch.num_tokens, lambda: None
    )
    async with stepping(worker), routing(worker, down) as router:
        yield router


async def note_cache(router: PlayedRouter, index: PrefixMap, worker: int, num_blocks: int) -> None:
    """Lets the index of a router hear all that the worker has said until now."""
    await asyncio.sleep(0)
    # What is sent has arrived with the next heartbeat.
    await router.heartbeat()
    for changes in router.cache_changes:
        index.apply(worker, changes, 4, num_blocks)
    router.cache_changes.clear()
