"""The receivers' slots in plain memory, what writes into them, and who may.

Stands for shared memory (a payload is there at once) and for one-sided writes over a network (it
arrives later, whether or not its sender still cares). The slots are granted by the product's SlotTable;
the witness knows who was granted what from the messages alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from baton.errors import PeerLost
from kvtransfer.contract import OutgoingFrame
from kvtransfer.slots import Sender, SlotTable
from tests.simulation.plan import Plan


@dataclass(frozen=True, slots=True)
class Segment:
    """What an arena offers of its memory."""

    path: Path
    nonce: bytes


class SimFrame(OutgoingFrame, Protocol):
    """A frame that says whose it is."""

    attempt_id: bytes


class WatchedSlots(SlotTable):
    """A SlotTable that tells what became of its slots."""

    def __init__(self, num_slots: int, plan: Plan, hit: Callable[[str], None]) -> None:
        super().__init__(num_slots, max_per_write=plan.max_slots_per_write, retire_s=plan.retire_s)
        self._hit = hit

    def end(self, write: object, now: float, *, is_quiet: bool) -> None:
        before = self.num_quarantined
        super().end(write, now, is_quiet=is_quiet)
        if self.num_quarantined > before:
            self._hit("slots were quarantined")

    def met(self, sender: Sender) -> None:
        before = self.num_quarantined
        super().met(sender)
        if self.num_quarantined < before:
            self._hit("a new life of a sender freed the slots of the old one")

    def retire(self, now: float) -> int:
        num_retired = super().retire(now)
        if num_retired:
            self._hit("slots were retired")
        return num_retired


class MemoryArena:
    """The arena of one life of a decode worker."""

    def __init__(
        self, name: str, num_slots: int, plan: Plan, nonce: bytes, hit: Callable[[str], None]
    ) -> None:
        self.name = name
        self.slot_bytes = plan.slot_bytes
        self.slots = WatchedSlots(num_slots, plan, hit)
        self.segment = Segment(Path(name), nonce)
        self._memory = np.zeros((num_slots, plan.slot_bytes), np.uint8)
        self._owners: dict[int, bytes] = {}

    def payload(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return memoryview(self._memory[slot])

    def granted(self, attempt_id: bytes, slots: Sequence[int]) -> None:
        """The worker said that an attempt's write may use them."""
        self._owners.update(dict.fromkeys(slots, attempt_id))

    def ended(self, attempt_id: bytes) -> None:
        """An attempt's write was committed, or said that it is quiet."""
        self._owners = {slot: owner for slot, owner in self._owners.items() if owner != attempt_id}

    def write(self, slot: int, frame: SimFrame) -> str:
        """Puts a payload there; what is wrong with that, or nothing."""
        payload = b"".join(frame.runs())
        self._memory[slot, : len(payload)] = np.frombuffer(payload, np.uint8)
        owner = self._owners.get(slot, b"")
        if owner == frame.attempt_id:
            return ""
        return f"{self.name}: {frame.attempt_id.hex()[:6]} wrote into slot {slot} of {owner.hex()[:6]}"

    def check(self) -> None:
        """free + held + quarantined + retired == all."""
        table = self.slots
        found = (table.num_free, table.num_held, table.num_quarantined, table.num_retired)
        assert sum(found) == table.num_slots, (
            f"{self.name}: free, held, quarantined, retired slots {found} of {table.num_slots}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How payloads get into slots. delay_s: time they take; failures: share that does not arrive."""

    delay_s: float
    failures: float
    rng: random.Random
    fail: Callable[[str], None] = field(repr=False)


class MemoryCarrier:
    """A Carrier of one sender into one arena."""

    num_slots = 16

    def __init__(self, arena: MemoryArena, wire: Wire) -> None:
        self._arena = arena
        self._wire = wire

    def fill(self, slots: Sequence[int], frames: Sequence[Any]) -> list[bytes]:
        headers = [frame.header() for frame in frames]
        if not self._wire.delay_s:
            self._write(slots, frames)
        return headers

    async def deliver(self, slots: Sequence[int], frames: Sequence[Any]) -> None:
        if self._wire.delay_s:
            # What is on its way cannot be called back.
            await asyncio.shield(asyncio.ensure_future(self._arrive(slots, frames)))
        if self._wire.failures and self._wire.rng.random() < self._wire.failures:
            raise PeerLost("the adapter reports an error")

    async def close(self) -> None:
        pass

    async def _arrive(self, slots: Sequence[int], frames: Sequence[SimFrame]) -> None:
        await asyncio.sleep(self._wire.delay_s * self._wire.rng.uniform(0.2, 1))
        self._write(slots, frames)

    def _write(self, slots: Sequence[int], frames: Sequence[SimFrame]) -> None:
        for slot, frame in zip(slots, frames, strict=True):
            defect = self._arena.write(slot, frame)
            if defect:
                self._wire.fail(defect)
