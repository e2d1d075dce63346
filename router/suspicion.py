"""Whether workers die of one request: what is counted, and when that is proof.

Owns the workers that were lost under a request. A lost session is not a death:
the worker may only be cut off. So a verdict, which is final, waits until either
would show: a worker that lives is connected again or at least announced, a dead
one is neither.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.registry import ANNOUNCED_S
from router.fleet import Fleet

# A worker may die of anything; of the same request twice is a reason to look closer.
DEATHS_BEFORE_ALONE = 2
# One death in a step of its own may be a coincidence, where machines fail often.
DEATHS_ALONE = 2
# Longer than a dead worker stays announced, and than a living one needs to announce itself again in a
# registry that was emptied.
VERDICT_S = ANNOUNCED_S + 4.0


@dataclass(frozen=True, slots=True)
class _Loss:
    """A worker that was lost under this request; alone: in a step that the request had to itself."""

    incarnation: int
    alone: bool
    at: float


class Suspicion:
    """The workers lost under one request.

    runs_alone: whether the worker has announced a step for this request only and not its end.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.runs_alone = False
        self._fleet = fleet
        self._losses: list[_Loss] = []
        self._is_judged = True

    @property
    def wants_alone(self) -> bool:
        """Whether the request should get steps of its own, so that nobody else dies with it."""
        return len(self._missing()) >= DEATHS_BEFORE_ALONE

    def lost(self, incarnation: int) -> None:
        """A worker that was computing this request is gone."""
        self._losses.append(_Loss(incarnation, self.runs_alone, asyncio.get_running_loop().time()))
        self._is_judged = False

    async def verdict(self) -> str:
        """What the request is found guilty of, or an empty string.

        Takes VERDICT_S where the losses would be proof if all of them were deaths, and no time otherwise.
        """
        if self._is_judged or not _is_proof(self._missing()):
            return ""
        self._is_judged = True
        await asyncio.sleep(VERDICT_S)
        deaths = [loss for loss in self._missing() if not self._fleet.is_announced(loss.incarnation)]
        if not _is_proof(deaths):
            return ""
        num_alone = sum(loss.alone for loss in deaths)
        return (
            f"workers died {len(deaths)} times while this request ran, {num_alone} times in a step that it "
            "had to itself; it will not be tried again"
        )

    def _missing(self) -> list[_Loss]:
        """Without workers that were there again as the same process: only their session was lost."""
        return [loss for loss in self._losses if not self._fleet.is_alive(loss.incarnation, loss.at)]


def _is_proof(losses: list[_Loss]) -> bool:
    # A request may have been sent to run alone because of sessions that were only cut: hence both numbers.
    num_alone = sum(loss.alone for loss in losses)
    return num_alone >= DEATHS_ALONE and len(losses) >= DEATHS_BEFORE_ALONE + DEATHS_ALONE
