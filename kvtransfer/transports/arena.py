"""The receiver's arena: slots of memory that senders write into, and what is offered of it.

Owns the memory. Which write has which slot is kvtransfer/slots.py's business, and what lies in a
slot is verified by kvtransfer/receiver.py before it touches the cache. All of it is allocated at start.
"""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path
from random import Random

import numpy as np

from baton.errors import ConfigError, Unavailable
from baton.logs import get_logger
from kvtransfer.slots import SlotTable
from kvtransfer.transports.nixl import NixlTarget
from kvtransfer.transports.shm import OFFSET_BYTES, ShmSegment

log = get_logger(__name__)

DEFAULT_SLOT_BYTES = 1 << 20


class Arena:
    """num_slots slots of slot_bytes each, in shared memory if there is room for it.

    A host without shared memory still has an arena, for one-sided writes over the network.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        *,
        folder: Path,
        rng: Random,
        name: str = "receiver",
        max_per_write: int = 16,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots = SlotTable(num_slots, max_per_write=max_per_write)
        self._name = name
        self._segment: ShmSegment | None = None
        self._nixl: NixlTarget | None = None
        self._registering = asyncio.Lock()
        self.shm_note = ""
        try:
            self._segment = ShmSegment.create(folder, num_slots * slot_bytes, rng)
            memory = self._segment.memory
        except ConfigError as error:
            self.shm_note = error.message
            log.warning("no shared memory for KV", reason=error.message)
            memory = mmap.mmap(-1, OFFSET_BYTES + num_slots * slot_bytes)
        self._memory = np.frombuffer(memory, np.uint8)[OFFSET_BYTES:]
        self._memory[:: mmap.PAGESIZE] = 0
        self._slots = self._memory.reshape(num_slots, slot_bytes)

    @classmethod
    def of_size(cls, num_bytes: int, *, folder: Path, rng: Random, name: str) -> Arena | None:
        """An arena of about that many bytes; None for 0, which is a receiver that only takes streams."""
        num_slots = num_bytes // DEFAULT_SLOT_BYTES
        return cls(num_slots, folder=folder, rng=rng, name=name) if num_slots else None

    def payload(self, slot: int) -> memoryview:
        """The bytes of a slot. Its writer may change them at any time."""
        return memoryview(self._slots[slot])

    @property
    def segment(self) -> ShmSegment:
        """The shared memory; raises Unavailable if there is none."""
        if self._segment is None:
            raise Unavailable(self.shm_note)
        return self._segment

    async def nixl(self) -> NixlTarget:
        """The arena registered for one-sided writes, on first use; raises Unavailable if that fails."""
        async with self._registering:
            if self._nixl is None:
                self._nixl = await NixlTarget.start(self._name, self._memory)
        return self._nixl

    def close(self) -> None:
        """Takes the offers back. Idempotent."""
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None
        if self._segment is not None:
            self._segment.close()
