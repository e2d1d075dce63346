"""Sessions without a network: two ends in one process, and a dialer that finds simulated workers by name.

Messages travel as bytes, as they do over gRPC. For figures of which a network must be no part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from baton.errors import PeerLost
from baton.ports import WorkerInfo

Serve = Callable[[Any], Coroutine[Any, Any, None]]


class MemorySession:
    """One end of a session; pair() makes both."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.last_received = asyncio.get_running_loop().time()
        self._inbox: asyncio.Queue[tuple[type[Any], bytes] | None] = asyncio.Queue()
        self._other: MemorySession | None = None
        self._closed = False

    @classmethod
    def pair(cls, left_peer: str, right_peer: str) -> tuple[MemorySession, MemorySession]:
        """Both ends, each by the name of its peer."""
        left, right = cls(left_peer), cls(right_peer)
        left._other, right._other = right, left
        return left, right

    def send(self, message: Any) -> None:
        """Queues a message at the other end; raises PeerLost if the session has ended."""
        if self._closed or self._other is None or self._other._closed:
            raise PeerLost(f"the session with {self.peer} has ended")
        self._other._inbox.put_nowait((type(message), message.SerializeToString()))

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The peer's messages; raises PeerLost when the peer ends the session."""
        while (item := await self._inbox.get()) is not None:
            self.last_received = asyncio.get_running_loop().time()
            kind, data = item
            yield kind.FromString(data)
        if not self._closed:
            raise PeerLost(f"{self.peer} ended the session")

    async def close(self) -> None:
        """Ends both directions; idempotent."""
        if not self._closed and self._other is not None:
            self._closed = True
            self._inbox.put_nowait(None)
            self._other._inbox.put_nowait(None)


class MemoryDialer:
    """Dials by name: runs that worker's serve() at the other end."""

    def __init__(self, workers: Mapping[str, Serve]) -> None:
        self._workers = workers

    @asynccontextmanager
    async def open(self, info: WorkerInfo) -> AsyncIterator[MemorySession]:
        """A session, ended when the block is left."""
        ours, theirs = MemorySession.pair(info.name, "router")
        serving = asyncio.create_task(self._workers[info.name](theirs), name=f"serve-{info.name}")
        try:
            yield ours
        finally:
            await ours.close()
            with suppress(PeerLost):
                await serving
