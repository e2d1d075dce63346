"""One limit of one tenant, as one router sees it: a token bucket that others draw from too.

A synchronous core: time comes in as an argument. It must not know tenants, requests or Redis.

The bucket is one router's replica of a bucket that all routers share. What the others took is
drained when it is heard of. While nothing is heard, they are assumed to go on as before: the refill
is lowered by their last known rate. To undo no more than that later, the replica is kept twice:
`_heard` from what was heard alone, `_level` with the assumption. `_level` decides and is never the
higher one; what is heard late is first covered by what was assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# The others' rate is an average that forgets in this time.
MEMORY_S = 10.0
# However much the others take, this share of the refill stays while they cannot be heard: they may be gone.
LEAST_SHARE = 0.1
# What is heard cannot put a tenant further behind than this many minutes: it may be a falsehood.
MOST_DEBT_MINUTES = 10.0
# A bucket that is full but for rounding is full.
_ROUNDING = 1e-9


class TokenBucket:
    """Holds a minute's worth and refills evenly.

    per_minute: units that come back in a minute, and the most there can be; at least 1.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._refill = per_minute / 60
        self._heard = self._level = float(per_minute)
        self._at = -math.inf
        self._others = 0.0
        self._heard_at: float | None = None
        self._is_assuming = False

    def level(self, now: float) -> float:
        """Units that are there; below 0 when more was taken than there was."""
        elapsed_s, self._at = max(0.0, now - self._at), max(self._at, now)
        self._heard = min(self.per_minute, self._heard + self._refill * elapsed_s)
        self._level = min(self._heard, self._level + self._rate * elapsed_s)
        return self._level

    def wait_s(self, now: float, amount: float) -> float:
        """Seconds until that amount may be taken, 0 for now, if nobody takes any before.

        More than the bucket ever holds may be taken once it is full, and leaves it below 0.
        """
        missing = min(amount, self.per_minute) - self.level(now)
        return missing / self._rate if missing > _ROUNDING * self.per_minute else 0.0

    def take(self, now: float, amount: float) -> None:
        """This router took that amount, whether it was there or not."""
        self.level(now)
        self._heard -= amount
        self._level -= amount

    def hear(self, now: float, amount: float) -> None:
        """The others took that amount since the last time they were heard."""
        self.level(now)
        self._heard = min(self._heard, max(self._heard - amount, -MOST_DEBT_MINUTES * self.per_minute))
        self._level = min(self._level, self._heard)
        # The first time it is what backlog() makes of the last minute.
        elapsed_s = 60.0 if self._heard_at is None else now - self._heard_at
        if elapsed_s > 0:
            self._others += (amount / elapsed_s - self._others) * -math.expm1(-elapsed_s / MEMORY_S)
        self._heard_at, self._is_assuming = now, False

    def assume(self, now: float) -> None:
        """The others cannot be heard: from now on they are taken to go on as before."""
        self.level(now)
        self._is_assuming = True

    @property
    def _rate(self) -> float:
        """Units per second that come back."""
        held = min(self._others, (1 - LEAST_SHARE) * self._refill) if self._is_assuming else 0.0
        return self._refill - held


def backlog(per_minute: int, amounts: Sequence[float], step_s: float) -> float:
    """What is missing in a bucket that was full before these amounts were taken, and refilled between them.

    amounts: oldest first, step_s seconds apart, the last one just now.
    """
    level = float(per_minute)
    for amount in amounts:
        level = min(per_minute, level + per_minute * step_s / 60) - amount
    return per_minute - level
