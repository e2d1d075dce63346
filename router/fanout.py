"""The answers to one prompt, side by side.

The first takes the full path alone. The others start when its KV is committed, beside
it, or when it has ended without. Knows nothing of how an answer comes about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.decode_link import DecodeLink


class Runnable(Protocol):
    """What can be fanned out: router/answer.py, or a test's own."""

    @property
    def committed(self) -> asyncio.Future[DecodeLink | None]:
        """Done once its KV is at a decode worker, with that worker, or with None once it ends without."""

    async def run(self) -> None:
        """Runs to the end; raises what ends it before."""


class Fanout:
    """Runs n answers to a prompt.

    make: the answer of that index, to run beside another at a decode worker, or anywhere.
    """

    def __init__(self, n: int, make: Callable[[int, DecodeLink | None], Runnable]) -> None:
        self._n = n
        self._make = make

    async def run(self) -> None:
        """Runs them to their end.

        Raises the error of the first that fails, when the others are cancelled and have ended. A
        cancel ends all.
        """
        try:
            async with asyncio.TaskGroup() as group:
                await self._start(group)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _start(self, group: asyncio.TaskGroup) -> None:
        first = self._make(0, None)
        running = group.create_task(first.run())
        if self._n == 1:
            return
        # Its generation sets the result; a cancel of this wait is not its own.
        beside = await asyncio.shield(first.committed)
        if beside is None:
            # It may have failed, and then no other is wanted.
            await running
        for index in range(1, self._n):
            group.create_task(self._make(index, beside).run())
