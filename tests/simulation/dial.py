"""The Dialer port over the simulated network: the real StreamSession on a simulated call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from baton.errors import PeerLost
from baton.ports import Session, WorkerInfo
from baton.sessions import StreamSession
from tests.simulation.calls import Caller


class SimDialer:
    """Dials the workers of one role.

    kind: name of the workers' method. decode: of a message from them. hit: told what was reached.
    """

    def __init__(
        self, kind: str, decode: Callable[[bytes], Any], caller: Caller, hit: Callable[[str], None]
    ) -> None:
        self._kind = kind
        self._decode = decode
        self._caller = caller
        self._hit = hit

    @asynccontextmanager
    async def open(self, info: WorkerInfo) -> AsyncIterator[Session[Any, Any]]:
        call = self._caller.open(self._kind, info.address.partition(":")[0], self._decode)
        try:
            async with StreamSession(info.name, call, call.write, call.cancel) as session:
                yield session
        except PeerLost as error:
            if "silent" in error.message:
                self._hit("a silent session was given up")
            if "restarted since" in error.message:
                self._hit("a stale announcement led to another incarnation")
            raise
