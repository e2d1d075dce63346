"""The end of a router: what runs has time to end, and what is left goes on at another router.

Owns the calls that are answered, until their end. Knows nothing of what an answer is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from baton.errors import Draining

# For the words that end the calls, after the grace time.
PARTING_S = 2.0


class Handover:
    """Calls that end with Draining once their router has no more time for them.

    has_begun: whether that is so; a call that is cancelled from then on is handed over.
    """

    def __init__(self) -> None:
        # In the order of their beginning: a simulation must repeat itself.
        self._calls: dict[asyncio.Timeout, None] = {}
        self.has_begun = False

    @asynccontextmanager
    async def covering(self) -> AsyncIterator[None]:
        """Runs one call; raises Draining, with the call cancelled, once begin() was called."""
        if self.has_begun:
            raise _draining()
        try:
            async with asyncio.timeout(None) as call:
                self._calls[call] = None
                try:
                    yield
                finally:
                    del self._calls[call]
        except TimeoutError:
            if not call.expired():
                raise
            raise _draining() from None

    def begin(self) -> None:
        """Ends all calls, and those that come from now on."""
        self.has_begun = True
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)

    async def drain(self, stop: Callable[[float], Awaitable[None]], grace_s: float) -> None:
        """Gives calls that run grace_s seconds to end, then hands over the rest.

        stop: the server's; takes no new calls from now on, and ends those that still run after as many
            seconds as it is given. It returns as soon as none does.
        """
        stopping = asyncio.ensure_future(stop(grace_s + PARTING_S))
        try:
            await asyncio.wait((stopping,), timeout=grace_s)
        finally:
            # Also where the drain itself is broken off: whoever stops the server waits for these calls.
            self.begin()
        await stopping


def _draining() -> Draining:
    return Draining("this router is about to leave; another one, or this one when it is back, can go on")
