"""How long a call may take, as callers of the SDK say it. Knows no call."""

from __future__ import annotations

import math
from typing import Final

from baton.errors import BatonError, InvalidRequest

# gRPC counts nanoseconds since 1970 in 64 bits; a moment beyond those has passed. A year is far below.
MAX_TIMEOUT_S: Final = 365 * 24 * 3600.0


def check_timeout(timeout_s: float | None, kind: type[BatonError] = InvalidRequest) -> float | None:
    """Seconds from above 0 to a year, or None where there is no limit.

    timeout_s: None and infinity are no limit.  kind: of the error for anything else.

    >>> check_timeout(2.5), check_timeout(float("inf"))
    (2.5, None)
    """
    if timeout_s is None or timeout_s == math.inf:
        return None
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (is_number and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise kind(
            f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0, at most a year "
            f"({MAX_TIMEOUT_S:.0f}), or math.inf for no limit",
            field="timeout_s",
        )
    return timeout_s
