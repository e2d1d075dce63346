"""SHA-256 of large files, remembered between processes.

A remembered digest is keyed by each file's path, size and modification time, so a
replaced file is read again. Knows nothing about what the files contain.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.cache import cache_dir

_READ_BYTES = 1 << 20


def no_report(_done: int, _total: int) -> None:
    """A progress callback that shows nothing."""


def sha256_of(paths: Sequence[Path], report: Callable[[int, int], None] = no_report) -> str:
    """Hex SHA-256 over the contents of the files, one after the other.

    For one file this is what `sha256sum` prints. report(done, total) counts bytes.
    """
    total = sum(path.stat().st_size for path in paths)
    digest = hashlib.sha256()
    done = 0
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                done += len(chunk)
                report(done, total)
    return digest.hexdigest()


def cached_sha256_of(paths: Sequence[Path]) -> str:
    """sha256_of, computed once per state of the files; the cache lies in the cache folder."""
    record = cache_dir() / "digests" / _key(paths)
    # A cache that cannot be read or written costs time, nothing else.
    with contextlib.suppress(OSError):
        return record.read_text(encoding="ascii")
    digest = sha256_of(paths)
    with contextlib.suppress(OSError):
        _remember(record, digest)
    return digest


def _remember(record: Path, digest: str) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: another process must never read half a digest.
    partial = record.with_name(f"{record.name}.{os.getpid()}")
    partial.write_text(digest, encoding="ascii")
    partial.replace(record)


def _key(paths: Sequence[Path]) -> str:
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()
