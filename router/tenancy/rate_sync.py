"""Keeps one router's rate limits in step with the other routers'.

A shell: a task of its own that exchanges counts about once a second. Serving never waits for it: while
it cannot reach the store, the core goes on with what it assumes. It must not know what is stored how.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.errors import Unavailable
from baton.logs import get_logger
from router.tenancy.rate_limits import WINDOW_S, RateLimits, Usage

log = get_logger(__name__)


class UsageStore(Protocol):
    """Where routers tell each other what they have admitted."""

    async def exchange(self, said: Sequence[Usage], windows: Sequence[int]) -> Sequence[Usage]:
        """Publishes what is said, and returns what all routers have said of these windows.

        A count replaces an earlier one of the same router, tenant and window. Raises Unavailable.
        """


class RateSync:
    """The exchange of one router.

    limits: the core.
    store: where the counts are.
    rng: spreads the exchanges of several routers.
    wall: the wall clock, in seconds since 1970: all routers must name a window alike.
    interval_s: pause between two exchanges, in seconds; it varies by a fifth.
    timeout_s: how long one may take, in seconds.
    max_backoff_s: longest pause between two attempts to reach the store, in seconds.

    num_failures counts the exchanges that have failed in a row.
    """

    def __init__(
        self,
        limits: RateLimits,
        store: UsageStore,
        *,
        rng: random.Random,
        wall: Callable[[], float],
        interval_s: float = 1.0,
        timeout_s: float = 1.0,
        max_backoff_s: float = 5.0,
    ) -> None:
        self._limits = limits
        self._store = store
        self._rng = rng
        self._wall = wall
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_backoff_s = max_backoff_s
        self.num_failures = 0

    async def run(self) -> None:
        """Exchanges at once and then for ever; without limits it only waits."""
        if not self._limits.has_limits:
            await asyncio.Event().wait()
        while True:
            await self.exchange()
            await asyncio.sleep(self._pause_s())

    async def exchange(self) -> None:
        """Says and hears once. A store that is away is logged once, and then assumed for."""
        window = int(self._wall() // WINDOW_S)
        said = self._limits.say(window)
        try:
            async with asyncio.timeout(self._timeout_s):
                heard = await self._store.exchange(said, self._limits.windows(window))
        except TimeoutError:
            self._lose(f"no answer in {self._timeout_s:g} s")
        except Unavailable as error:
            self._lose(error.message)
        else:
            self._limits.hear(heard, window, asyncio.get_running_loop().time())
            if self.num_failures:
                log.info("rate limits shared again", num_failures=self.num_failures)
            self.num_failures = 0

    def _lose(self, reason: str) -> None:
        if self.num_failures == 0:
            log.warning("rate limits not shared", reason=reason)
        self.num_failures += 1
        self._limits.lose(asyncio.get_running_loop().time())

    def _pause_s(self) -> float:
        if self.num_failures == 0:
            return self._rng.uniform(0.8, 1.2) * self._interval_s
        # Full jitter: all routers lose the same Redis at the same moment.
        ceiling = min(self._max_backoff_s, self._interval_s * 2.0 ** min(self.num_failures, 16))
        return self._rng.uniform(0.1, 1.0) * ceiling
