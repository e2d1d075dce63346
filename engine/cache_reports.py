"""What a pool's prefix cache holds, as net changes between two reports.

A synchronous core, and the one reader of BlockPool.drain_events(). It keeps no keys of its own: the
pool knows what there is, and its log knows what has changed. It does not know who is told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.prefix_index import CacheEvent, Removed, Resync, Stored

if TYPE_CHECKING:
    from engine.block_pool import BlockPool

# 256 KiB of keys: far below what one message may have.
MAX_REPORTED_KEYS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """What changed. No key is in both, and parents come before their children.

    reset: forget everything; `stored` begins the complete list.
    """

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    reset: bool = False


class CacheReports:
    """Reports on one pool. Who applies them in order, from a complete list on, holds what the pool holds.

    max_keys: most keys stored, and most removed, in one report.
    """

    def __init__(self, pool: BlockPool, *, max_keys: int = MAX_REPORTED_KEYS) -> None:
        self._pool = pool
        self._max_keys = max_keys

    def complete(self) -> list[CacheReport]:
        """All that can be found now. For one who hears it first; changes() goes on from its last call."""
        parts = list(_parts(parents_first(self._pool.stored()), self._max_keys)) or [()]
        return [CacheReport(stored=part, reset=part is parts[0]) for part in parts]

    def changes(self) -> list[CacheReport]:
        """What changed since the last call; empty if nothing did, the complete list if that is lost."""
        events = self._pool.drain_events()
        if events == [Resync()]:
            return self.complete()
        stored, removed = _net(events)
        reports = itertools.zip_longest(
            _parts(parents_first(stored), self._max_keys), _parts(removed, self._max_keys), fillvalue=()
        )
        return [CacheReport(stored=gained, removed=lost) for gained, lost in reports]


def parents_first(stored: Iterable[Stored]) -> list[bytes]:
    """The keys, each after its parent's if that is among them; otherwise in their order.

    A parent can be stored anew while its children stay, so no order of time will do.
    """
    parent_of = {entry.key: entry.parent_key for entry in stored}
    ordered: dict[bytes, None] = {}
    for key in parent_of:
        line: list[bytes] = []
        ancestor: bytes | None = key
        while ancestor in parent_of and ancestor not in ordered:
            line.append(ancestor)
            ancestor = parent_of[ancestor]
        ordered.update(dict.fromkeys(reversed(line)))
    return list(ordered)


def _net(events: Iterable[CacheEvent]) -> tuple[list[Stored], list[bytes]]:
    """What is stored now and was not before, and the other way round."""
    was_stored: dict[bytes, bool] = {}
    now: dict[bytes, Stored | Removed] = {}
    for event in events:
        assert not isinstance(event, Resync)
        # A key's first event says what it was: only what was not there can be stored.
        was_stored.setdefault(event.key, isinstance(event, Removed))
        now[event.key] = event
    stored = [e for e in now.values() if isinstance(e, Stored) and not was_stored[e.key]]
    removed = [e.key for e in now.values() if isinstance(e, Removed) and was_stored[e.key]]
    return stored, removed


def _parts(keys: list[bytes], size: int) -> Iterator[tuple[bytes, ...]]:
    for start in range(0, len(keys), size):
        yield tuple(keys[start : start + size])
