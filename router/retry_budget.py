"""How many further attempts a router may make: a fleet that is failing must not be asked even more often.

A synchronous core. The budget is a bucket: it starts full, a further attempt takes one, and each
request that ends well gives a part of one back. A single death, with all its requests resumed at
once, stays far inside it; a fleet on which most attempts fail soon gets first attempts only.
"""

from __future__ import annotations

CAPACITY = 256.0
PER_SUCCESS = 0.1


class RetryBudget:
    """The further attempts left to one router, over all its requests."""

    def __init__(self, capacity: float = CAPACITY, per_success: float = PER_SUCCESS) -> None:
        self._capacity = capacity
        self._per_success = per_success
        self._left = capacity

    def take(self) -> bool:
        """Uses one further attempt; False if none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def succeeded(self) -> None:
        """A request ended well."""
        self._left = min(self._capacity, self._left + self._per_success)
