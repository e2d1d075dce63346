"""SlotTable: which write may use which slots of the receiver's arena, and when a slot is safe again.

A sender writes into slots without the receiver's doing: through shared memory, or one-sided
over the network. A slot is therefore only given to another write once its writer cannot
write any more:

    FREE --grant--> HELD --end(is_quiet=True)------------------------------------> FREE
                      |                                                              ^
                      +--end(is_quiet=False)--> QUARANTINED --met() or vouched()-----+
                                                     |                               |
                                                     +--retire_s pass--> RETIRED ----+

A writer is quiet when it says so, or commits: its protocol is to write first and to commit
then. One that was cut off is not; its slots wait until its sender vouches for it with a later
write, or a new incarnation of the sender shows that the old one is dead. A slot that waits for
longer than retire_s is counted as given up; should word come all the same, it is free again.

The decode worker's event loop owns the table. It must not know memory, asyncio or clocks; `now`
is in seconds and never decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sender:
    """Who writes: the name of a prefill worker, and its incarnation."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class _Quarantine:
    write: Hashable
    slots: tuple[int, ...]
    sender: Sender
    since: float


class SlotTable:
    """The slots of one arena.

    max_per_write: most that one write gets; fewer where fewer are free.
    retire_s: time after which a slot that nobody has vouched for counts as given up.
    """

    def __init__(self, num_slots: int, *, max_per_write: int = 16, retire_s: float = 60.0) -> None:
        self.num_slots = num_slots
        self._max_per_write = max_per_write
        self._retire_s = retire_s
        self._free = list(range(num_slots))
        self._held: dict[Hashable, tuple[Sender, tuple[int, ...]]] = {}
        self._quarantined: list[_Quarantine] = []
        self._retired: list[_Quarantine] = []

    @property
    def num_free(self) -> int:
        """Slots that a write can get now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots that open writes have."""
        # A copy, because a collector's thread may ask.
        return sum(len(slots) for _, slots in list(self._held.values()))

    @property
    def num_quarantined(self) -> int:
        """Slots whose writer was cut off and may still write."""
        return sum(len(quarantine.slots) for quarantine in self._quarantined)

    @property
    def num_retired(self) -> int:
        """Slots that have waited for longer than retire_s."""
        return sum(len(quarantine.slots) for quarantine in self._retired)

    def counts(self) -> dict[str, int]:
        """All slots, by state."""
        return {
            "free": self.num_free,
            "held": self.num_held,
            "quarantined": self.num_quarantined,
            "retired": self.num_retired,
        }

    def grant(self, write: Hashable, sender: Sender, num_wanted: int, now: float) -> tuple[int, ...]:
        """Slots for a write that has none: as many as it wants, may have and are free; perhaps none."""
        if write in self._held:
            raise ValueError("the write has its slots already")
        self.retire(now)
        self.met(sender)
        count = min(num_wanted, self._max_per_write, len(self._free))
        if count <= 0:
            return ()
        # The one used last is the one whose memory is in the processor's cache.
        slots, self._free = tuple(self._free[-count:]), self._free[:-count]
        self._held[write] = (sender, slots)
        return slots

    def holds(self, write: Hashable, slot: int) -> bool:
        """Whether a slot is the write's."""
        held = self._held.get(write)
        return held is not None and slot in held[1]

    def end(self, write: Hashable, now: float, *, is_quiet: bool) -> None:
        """The write uses its slots no more; is_quiet: its sender cannot either. Idempotent."""
        sender, slots = self._held.pop(write, (None, ()))
        if sender is None:
            return
        if is_quiet:
            self._free.extend(slots)
        else:
            self._quarantined.append(_Quarantine(write, slots, sender, now))

    def met(self, sender: Sender) -> None:
        """A sender has shown itself: older incarnations of that name are dead and write no more."""
        self._free_where(
            lambda q: q.sender.name == sender.name and q.sender.incarnation != sender.incarnation
        )

    def vouched(self, sender: Sender, may_write: Callable[[Hashable], bool]) -> None:
        """A sender says of which of its writes something may still be under way; the others are quiet."""
        self._free_where(lambda q: q.sender == sender and not may_write(q.write))

    def retire(self, now: float) -> int:
        """Counts as given up what has been quarantined for too long; returns how many slots that were."""
        old = [q for q in self._quarantined if now - q.since >= self._retire_s]
        self._quarantined = [q for q in self._quarantined if q not in old]
        self._retired += old
        return sum(len(quarantine.slots) for quarantine in old)

    def _free_where(self, is_safe: Callable[[_Quarantine], bool]) -> None:
        for waiting in (self._quarantined, self._retired):
            for quarantine in [q for q in waiting if is_safe(q)]:
                waiting.remove(quarantine)
                self._free.extend(quarantine.slots)
