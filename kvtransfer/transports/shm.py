"""Shared memory between two workers of one host.

Owns the segment: its file, its nonce, and the views into it. Must not know frames' contents,
leases, or which write has which slot (kvtransfer/slots.py).

    offset   bytes        content
         0      16        nonce; reading it there proves that both are on one host, in one file system
         4096   N * size  slots

The receiver creates the segment and touches every page at once: the first touch of shared memory was
measured ten times slower than the copy itself. It holds a lock on the file for as long as it lives,
so that a later worker can tell a segment that a killed one has left behind, and remove it.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from baton.errors import ConfigError, PeerLost
from baton.segment_files import remove_stale
from kvtransfer.contract import OutgoingFrame

NONCE_BYTES = 16
OFFSET_BYTES = 4096
# Mapping touches every page; a file that claims more is no arena.
MAX_SEGMENT_BYTES = 64 << 30
_NAME = re.compile(r"baton-[0-9a-f]{16}\.kv")


class ShmSegment:
    """A receiver's segment. close() removes it.

    nonce: what lies at its start.
    """

    def __init__(self, path: Path, fd: int, memory: mmap.mmap, nonce: bytes) -> None:
        self.path = path
        self.nonce = nonce
        self.memory = memory
        self._fd = fd

    @classmethod
    def create(cls, folder: Path, num_bytes: int, rng: Random) -> ShmSegment:
        """A segment with room for num_bytes of slots, all of its pages touched.

        Raises ConfigError if the folder has no such room or cannot be used.
        """
        remove_stale(folder)
        size = OFFSET_BYTES + num_bytes
        try:
            path, fd = _create_locked(folder, rng)
        except OSError as error:
            raise ConfigError(
                f"shm_folder {folder} cannot be used: {error.strerror}", field="shm_folder"
            ) from None
        try:
            # Reserves the memory: without it a full file system would kill the process at a write.
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise ConfigError(
                f"{folder} has no room for {size} bytes of shared memory ({error.strerror}); "
                "enlarge it or lower arena_bytes",
                field="arena_bytes",
            ) from None
        nonce = rng.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
        memory[:NONCE_BYTES] = nonce
        return cls(path, fd, memory, nonce)

    def close(self) -> None:
        """Removes the file; its memory goes with the last process that has it. Idempotent."""
        self.path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShmCarrier:
    """Puts payloads into the slots of a receiver on the same host: a Carrier."""

    num_slots = 16

    def __init__(self, slots: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        self._slots = slots

    @classmethod
    def attach(
        cls, path: str, nonce: bytes, slot_bytes: int, *, folder: Path, offset_bytes: int = OFFSET_BYTES
    ) -> ShmCarrier:
        """Maps a receiver's segment; raises PeerLost, with the reason, if it is not reachable from here.

        folder: the only place where a segment may lie, whatever the receiver says.
        """
        file = Path(path)
        if file.parent != folder or not _NAME.fullmatch(file.name):
            raise PeerLost(f"its segment does not lie in {folder}")
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise PeerLost(f"its segment cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            num_slots = (status.st_size - offset_bytes) // slot_bytes
            if status.st_uid != os.geteuid() or status.st_size > MAX_SEGMENT_BYTES:
                raise PeerLost("its segment belongs to somebody else, or is larger than any arena")
            if not stat.S_ISREG(status.st_mode) or offset_bytes < NONCE_BYTES or num_slots < 1:
                raise PeerLost("its segment has no slots")
            memory = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise PeerLost(f"its segment cannot be mapped: {error.strerror}") from None
        finally:
            os.close(fd)
        if not hmac.compare_digest(memory[:NONCE_BYTES], nonce):
            raise PeerLost("another segment of that name lies here: the two are not on one host")
        area = np.frombuffer(memory, np.uint8, num_slots * slot_bytes, offset_bytes)
        return cls(area.reshape(num_slots, slot_bytes))

    def fill(self, slots: Sequence[int], frames: Sequence[OutgoingFrame]) -> list[bytes]:
        """Copies each frame into its slot; the header's digest is of the bytes that were read for it."""
        headers = []
        for slot, frame in zip(slots, frames, strict=True):
            check_fits(frame, self._slots.shape[1])
            # The digest brings the bytes into the processor's cache, the copy finds them there.
            headers.append(frame.header())
            start = 0
            for run in frame.runs():
                self._slots[slot, start : start + run.nbytes] = np.frombuffer(run, np.uint8)
                start += run.nbytes
        return headers

    async def deliver(self, slots: Sequence[int], frames: Sequence[OutgoingFrame]) -> None:
        """They are there already."""

    async def close(self) -> None:
        """The memory goes with the last view of it."""


def check_fits(frame: OutgoingFrame, slot_bytes: int) -> None:
    """Raises ValueError for a frame that would reach into the next slot, which is another write's."""
    if frame.num_bytes > slot_bytes:
        raise ValueError(f"a frame of {frame.num_bytes} bytes does not fit into a slot of {slot_bytes}")


def _create_locked(folder: Path, rng: Random) -> tuple[Path, int]:
    """A new file, locked before anybody could take it for a stale one and remove it."""
    while True:
        path = folder / f"baton-{rng.getrandbits(64):016x}.kv"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        except BlockingIOError:
            pass  # whoever has the lock is about to remove the file
        os.close(fd)
