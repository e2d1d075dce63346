"""The end of an engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from engine.engine import Engine


@dataclass
class Closing:
    """A thread that ends once all others have been told to."""

    all_told: asyncio.Barrier
    timeouts_s: list[float] = field(default_factory=list)

    async def close(self, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)
        await self.all_told.wait()


async def test_its_threads_are_closed_beside_each_other() -> None:
    both: Any = asyncio.Barrier(2)
    thread, masks, unused = Closing(both), Closing(both), object()
    parts: dict[str, Any] = {"runner": thread, "mask_pool": masks}
    engine = Engine(**parts, cache=unused, pool=unused, scheduler=unused)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        await engine.close(3.0)
    assert thread.timeouts_s == masks.timeouts_s == [3.0]
