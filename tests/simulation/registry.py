"""A registry with the semantics of the one in Redis: entries end by themselves, and it may be away.

Owns the entries and its three faults: down, stale (watchers see an old state), emptied.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

from baton.errors import Unavailable
from baton.ports import WorkerInfo

COMMAND_S = 0.002
POLL_S = 0.5


class RegistryServer:
    """What all clients share."""

    def __init__(self) -> None:
        self.is_down = False
        self._entries: dict[int, tuple[WorkerInfo, float]] = {}
        self._stale: tuple[WorkerInfo, ...] | None = None

    def put(self, info: WorkerInfo, ends_at: float) -> None:
        self._entries[info.incarnation] = (info, ends_at)

    def remove(self, info: WorkerInfo) -> None:
        self._entries.pop(info.incarnation, None)

    def read(self, now: float) -> tuple[WorkerInfo, ...]:
        """The announced workers by name, or what they were when the registry went stale."""
        if self._stale is not None:
            return self._stale
        living = [info for info, ends_at in self._entries.values() if now < ends_at]
        return tuple(sorted(living, key=lambda info: (info.name, info.incarnation)))

    def empty(self) -> None:
        """A failover to a replica that knows nothing."""
        self._entries.clear()

    def go_stale(self, now: float) -> None:
        self._stale = self.read(now)

    def heal(self) -> None:
        self.is_down, self._stale = False, None


class RegistryClient:
    """The Registry port of one process."""

    def __init__(self, server: RegistryServer, rng: random.Random) -> None:
        self._server = server
        self._rng = rng

    async def register(self, info: WorkerInfo, ttl_s: float) -> None:
        """Announces a worker; raises Unavailable while the registry is down."""
        await self._command()
        self._server.put(info, asyncio.get_running_loop().time() + ttl_s)

    async def deregister(self, info: WorkerInfo) -> None:
        """Withdraws an announcement."""
        await self._command()
        self._server.remove(info)

    async def watch(self) -> AsyncIterator[Sequence[WorkerInfo]]:
        """The announced workers, now and whenever they change; silent while the registry is down."""
        known: tuple[WorkerInfo, ...] | None = None
        while True:
            try:
                await self._command()
            except Unavailable:
                found = known or ()
            else:
                found = self._server.read(asyncio.get_running_loop().time())
            if found != known:
                known = found
                yield known
            await asyncio.sleep(self._rng.uniform(0.8, 1.2) * POLL_S)

    async def _command(self) -> None:
        await asyncio.sleep(COMMAND_S)
        if self._server.is_down:
            raise Unavailable("the registry is down")
