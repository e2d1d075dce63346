"""The clock of the leases: a timer that fires when one is to be looked at.

Owns the timer. What becomes of a lease that nobody renews is the table's and the worker's matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_worker.attempt import Attempt
from kvtransfer.lease_table import Lease, LeaseTable


class LeaseClock:
    """Ends the leases of one table in time. lost: called with each that has expired."""

    def __init__(self, leases: LeaseTable[Attempt], lost: Callable[[Lease[Attempt]], None]) -> None:
        self._leases = leases
        self._lost = lost
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """A lease has been granted: the timer is set no later than its deadline."""
        deadline = self._leases.next_deadline()
        if deadline is None:
            return
        if self._timer is not None:
            # A tombstone's deadline may be set while a new lease ends before it.
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._fire)

    def _fire(self) -> None:
        """At the earliest deadline; renewals may have moved it."""
        self._timer = None
        for lease in self._leases.expire(asyncio.get_running_loop().time()):
            self._lost(lease)
        self.watch()
