"""A worker's announcement that is kept fresh, as the process of a worker keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.ports import Registry, WorkerInfo
from baton.registry import Announcement, registering


@asynccontextmanager
async def announcing(registry: Registry, info: WorkerInfo, ttl_s: float) -> AsyncIterator[Announcement]:
    async with registering(registry, info, ttl_s) as announcement:
        keeper = asyncio.create_task(announcement.keep())
        try:
            yield announcement
        finally:
            keeper.cancel()
            await asyncio.wait([keeper])
    assert keeper.cancelled()
