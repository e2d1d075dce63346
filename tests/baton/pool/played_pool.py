"""A pool of idle workers over a runtime that is played."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.pool.config import PoolConfig
from baton.pool.placing import Ask
from baton.pool.state import State
from baton.pool.worker_pool import WorkerPool
from tests.baton.pool.played_runtime import PlayedRuntime
from tests.idle_role import IdleConfig, IdlePool


class SlotConfig(PoolConfig):
    """Asks the played nodes for a slot."""

    def ask(self, role: str):
        return Ask(resources={"slot": 1.0})


def new_pool(runtime: PlayedRuntime, **settings) -> WorkerPool:
    config = SlotConfig(**{"drain_s": 5.0, **settings})
    return IdlePool(config, IdleConfig(), runtime, random.Random(1))


@asynccontextmanager
async def running(number: int, runtime: PlayedRuntime, **settings) -> AsyncIterator[WorkerPool]:
    """A started pool; at the end nothing is left of it."""
    pool = new_pool(runtime, **settings)
    await pool.start(number)
    keeping = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        keeping.cancel()
        await pool.close()
        await asyncio.gather(keeping, return_exceptions=True)
    assert (list(pool.members), runtime.groups) == ([], {})


def states(pool: WorkerPool) -> dict[str, State]:
    return {member.name: member.state for member in pool.members}


def member(pool: WorkerPool, name: str):
    return next(member for member in pool.members if member.name == name)
