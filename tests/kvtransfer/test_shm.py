"""Segments of shared memory: what is created, attached to, refused and removed."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.errors import ConfigError, PeerLost, Unavailable
from baton.segment_files import remove_stale
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.shm import OFFSET_BYTES, ShmCarrier, ShmSegment

SLOT = 4096
_OWNER = """
import random, sys, time
from pathlib import Path
from kvtransfer.transports.shm import ShmSegment
segment = ShmSegment.create(Path(sys.argv[1]), 4096, random.SystemRandom())
print(segment.path, flush=True)
time.sleep(60)
"""


class Bytes:
    """An OutgoingFrame of given bytes."""

    def __init__(self, header: bytes, *runs: bytes) -> None:
        self._header, self._runs = header, [memoryview(run) for run in runs]

    @property
    def num_bytes(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def runs(self) -> list[memoryview]:
        return self._runs

    def header(self) -> bytes:
        return self._header


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[ShmSegment]:
    segment = ShmSegment.create(tmp_path, 2 * SLOT, random.Random(1))
    yield segment
    segment.close()


def attach(segment: ShmSegment, path: Path | None = None, **options: object) -> ShmCarrier:
    arguments: dict[str, object] = {"folder": segment.path.parent, **options}
    nonce = arguments.pop("nonce", segment.nonce)
    return ShmCarrier.attach(str(path or segment.path), nonce, SLOT, **arguments)  # type: ignore[arg-type]


def test_what_a_sender_fills_in_lies_in_the_receivers_slot(segment: ShmSegment) -> None:
    carrier = attach(segment)
    frames = [Bytes(b"h1", b"ab", b"", b"cde"), Bytes(b"h2", b"x" * SLOT)]
    assert carrier.fill([1, 0], frames) == [b"h1", b"h2"]
    assert segment.memory[OFFSET_BYTES + SLOT :][:6] == b"abcde\0"
    assert segment.memory[OFFSET_BYTES:][: SLOT + 1] == b"x" * SLOT + b"a"


def test_a_frame_larger_than_a_slot_touches_no_slot(segment: ShmSegment) -> None:
    carrier = attach(segment)
    with pytest.raises(ValueError, match="does not fit into a slot of 4096"):
        carrier.fill([0], [Bytes(b"h", b"x" * SLOT, b"y")])
    assert segment.memory[OFFSET_BYTES:] == bytes(2 * SLOT)


def test_a_segment_is_its_owners_alone_and_named_by_chance(segment: ShmSegment, tmp_path: Path) -> None:
    status = segment.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == OFFSET_BYTES + 2 * SLOT
    assert segment.path.read_bytes()[:16] == segment.nonce
    other = ShmSegment.create(tmp_path, SLOT, random.Random(2))
    assert other.path != segment.path
    assert other.nonce != segment.nonce
    other.close()


def test_a_closed_segment_is_unlinked_and_stays_usable_where_it_is_attached(segment: ShmSegment) -> None:
    carrier = attach(segment)
    segment.close()
    segment.close()
    assert list(segment.path.parent.iterdir()) == []
    carrier.fill([0], [Bytes(b"h", b"late")])
    with pytest.raises(PeerLost, match="cannot be opened: No such file"):
        attach(segment)


def test_a_segment_with_another_nonce_is_another_hosts(segment: ShmSegment) -> None:
    for nonce in (bytes(16), b"", segment.nonce[:15]):
        with pytest.raises(PeerLost, match="the two are not on one host"):
            attach(segment, nonce=nonce)


def test_a_path_outside_the_folder_is_not_opened(segment: ShmSegment, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    outside = [segment.path, inner / ".." / segment.path.name, Path(segment.path.name)]
    for path in outside:
        with pytest.raises(PeerLost, match="does not lie in"):
            attach(segment, path, folder=inner)


@pytest.mark.parametrize(
    "name", ["passwd", "baton-1.kv", "baton-00112233445566XX.kv", "baton-0011223344556677.kv.d"]
)
def test_a_file_that_is_not_named_like_a_segment_is_not_opened(
    segment: ShmSegment, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(segment.nonce + bytes(2 * SLOT))
    with pytest.raises(PeerLost, match="does not lie in"):
        attach(segment, tmp_path / name)


def test_a_link_and_a_folder_are_not_followed(segment: ShmSegment, tmp_path: Path) -> None:
    link, folder = tmp_path / f"baton-{1:016x}.kv", tmp_path / f"baton-{2:016x}.kv"
    link.symlink_to(segment.path)
    folder.mkdir()
    for path in (link, folder):
        with pytest.raises(PeerLost, match="cannot be opened"):
            attach(segment, path)


@pytest.mark.parametrize("num_bytes", [0, 16, OFFSET_BYTES, OFFSET_BYTES + SLOT - 1])
def test_a_file_without_room_for_a_slot_is_refused(segment: ShmSegment, num_bytes: int) -> None:
    os.truncate(segment.path, num_bytes)
    with pytest.raises(PeerLost, match="has no slots"):
        attach(segment)


@pytest.mark.parametrize("offset_bytes", [0, 15, 1 << 60])
def test_an_offset_that_cannot_be_is_refused(segment: ShmSegment, offset_bytes: int) -> None:
    with pytest.raises(PeerLost, match="has no slots"):
        attach(segment, offset_bytes=offset_bytes)


def test_a_folder_without_room_is_a_config_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"no room for 12288 bytes .*No space left") as caught:
        ShmSegment.create(tmp_path, 2 * SLOT, random.Random(1))
    assert caught.value.field == "arena_bytes"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be used: No such file") as caught:
        ShmSegment.create(tmp_path / "missing", SLOT, random.Random(1))
    assert caught.value.field == "shm_folder"


def test_an_arena_without_shared_memory_has_slots_and_says_why_it_offers_none(tmp_path: Path) -> None:
    arena = Arena(3, SLOT, folder=tmp_path / "missing", rng=random.Random(1))
    with pytest.raises(Unavailable, match="missing cannot be used"):
        _ = arena.segment
    assert arena.slots.num_free == 3
    assert arena.payload(2).nbytes == SLOT
    arena.close()


@contextmanager
def owner(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a segment."""
    process = subprocess.Popen([sys.executable, "-c", _OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def test_the_segment_of_a_killed_process_is_removed_and_that_of_a_living_one_kept(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, path):
        assert path.parent == tmp_path
        assert remove_stale(tmp_path) == 0
        assert path.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        mine = ShmSegment.create(tmp_path, SLOT, random.Random(1))
        assert list(tmp_path.iterdir()) == [mine.path]
        assert remove_stale(tmp_path) == 0
        mine.close()


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    files = [tmp_path / "baton.kv", tmp_path / "other", tmp_path / "baton-notes.txt"]
    for file in files:
        file.touch()
    assert remove_stale(tmp_path) == 0
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_a_segment_taken_for_a_stale_one_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another worker starts between the creation of the file and its lock.
    import fcntl

    lock, num_locks = fcntl.flock, 0

    def late(fd: int, operation: int) -> None:
        nonlocal num_locks
        num_locks += 1
        if num_locks == 1:
            assert remove_stale(tmp_path) == 1
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    segment = ShmSegment.create(tmp_path, SLOT, random.Random(1))
    assert list(tmp_path.iterdir()) == [segment.path]
    assert attach(segment).fill([0], [Bytes(b"h", b"x")]) == [b"h"]
    segment.close()
