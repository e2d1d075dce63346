"""How a worker leaves: it takes nothing new, ends what it has, hands over the rest, and lets its routers go.

Owns the order and the time limits. Knows neither attempts nor sessions but by the questions it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from baton.errors import ConfigError, Draining, InvalidRequest
from baton.logs import get_logger

# A router leaves as soon as it knows that it has nothing here; one that does not is not waited for.
LEAVE_S: Final = 1.0

log = get_logger(__name__)


def check_drain(drain_s: float) -> None:
    """Raises ConfigError unless it is a number of seconds that one can wait."""
    if not 0 <= drain_s < float("inf"):
        raise ConfigError(f"drain_s is {drain_s}; it must be 0 or more", field="drain_s")


def last_of_role(role: str, name: str) -> InvalidRequest:
    """Why the last worker of a role that serves is not drained, in the same words whoever runs it."""
    return InvalidRequest(
        f"no other {role} worker serves: without {name} there would be none; scale up first, or drain it "
        "with force (`baton drain --force`)",
        field="force",
    )


class Drain:
    """Whether a worker is leaving, and its way out.

    announce: tells its routers that it is leaving.
    is_idle: whether it has no attempt.
    hand_over: ends the attempts there are with an error that lets others go on with them.
    has_left: whether nothing of it is under way and no router is here.
    """

    def __init__(
        self,
        *,
        announce: Callable[[], None],
        is_idle: Callable[[], bool],
        hand_over: Callable[[Draining], None],
        has_left: Callable[[], bool],
    ) -> None:
        self.is_draining = False
        self._announce = announce
        self._is_idle = is_idle
        self._hand_over = hand_over
        self._has_left = has_left
        self._changed = asyncio.Event()

    @property
    def complaint(self) -> str:
        """Why the worker takes nothing; empty unless it is leaving."""
        return "it is leaving" if self.is_draining else ""

    def check(self) -> None:
        """Raises Draining once the worker is leaving: from then on it takes no session and no attempt."""
        if self.is_draining:
            raise Draining("the worker is leaving and takes no new work")

    def changed(self) -> None:
        """The answers to the questions may have changed."""
        self._changed.set()

    async def run(self, grace_s: float) -> None:
        """Returns when the worker may go. grace_s: time for its attempts to end, in seconds."""
        self.is_draining = True
        self._announce()
        log.info("draining", grace_s=grace_s)
        if not await self._until(self._is_idle, grace_s):
            log.info("handing over what has not ended")
            self._hand_over(Draining("the worker is leaving, and its grace time is over"))
        if not await self._until(self._has_left, LEAVE_S):
            log.info("not everything has left")

    async def _until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_over():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return is_over()
        return True
