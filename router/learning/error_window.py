"""How far predictions were off lately.

A synchronous core: it keeps a bounded number of relative errors, and forgets the oldest.
"""

from __future__ import annotations

import math
from collections import deque


class ErrorWindow:
    """The relative errors of the last `size` predictions."""

    __slots__ = ("_errors",)

    def __init__(self, size: int) -> None:
        self._errors: deque[float] = deque(maxlen=size)

    def add(self, predicted: float, measured: float, floor: float) -> None:
        """Notes |predicted - measured| / measured; measurements below `floor` (above 0) are divided by it."""
        self._errors.append(abs(predicted - measured) / max(measured, floor))

    def p90(self) -> float:
        """The smallest error that at least 90 % of them do not exceed; 0 before the first."""
        if not self._errors:
            return 0.0
        return sorted(self._errors)[math.ceil(0.9 * len(self._errors)) - 1]
