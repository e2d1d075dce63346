"""Which block holds which prefix, and what a router's index must hear about it.

A synchronous core over keys, token ids and block ids. It does not know who uses a block or when one
is evicted; that is BlockPool's, and only BlockPool calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.prefix_keys import ROOT_KEY, pack_tokens


@dataclass(frozen=True, slots=True)
class Stored:
    """A block can be found by `key` now; `parent_key` names the block before it, ROOT_KEY none."""

    key: bytes
    parent_key: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """No block is found by `key` any more."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Resync:
    """Events were lost: forget everything told before, and take BlockPool.stored()."""


CacheEvent = Stored | Removed | Resync


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a published block holds. packed: its token ids, by pack_tokens."""

    key: bytes
    parent_key: bytes
    packed: bytes


class PrefixIndex:
    """Published blocks by key. One block per key, one key per block.

    max_events: above it the log of changes becomes a single Resync.
    on_event: called when the first change since the last drain is logged.
    """

    def __init__(self, max_events: int) -> None:
        self.on_event: Callable[[], None] = _ignore
        self._max_events = max_events
        self._block_of: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._events: list[CacheEvent] = []

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, block_id: int, key: bytes, *, parent_key: bytes, token_ids: Sequence[int]) -> bool:
        """Makes a block findable; False, and nothing changed, if another block has the key.

        Raises ValueError if the block is published under another key.
        """
        entry = self._entries.get(block_id)
        if entry is not None and entry.key != key:
            raise ValueError(f"block {block_id} is published under another key")
        holder = self._block_of.setdefault(key, block_id)
        if entry is None and holder == block_id:
            self._entries[block_id] = _Entry(key, parent_key, pack_tokens(token_ids))
            self._log(Stored(key, parent_key))
        return holder == block_id

    def remove(self, block_id: int) -> None:
        """Forgets a block that is published."""
        entry = self._entries.pop(block_id)
        del self._block_of[entry.key]
        self._log(Removed(entry.key))

    def clear(self) -> None:
        """Forgets all blocks."""
        self._entries.clear()
        self._block_of.clear()
        is_news = not self._events
        self._events = [Resync()]
        if is_news:
            self.on_event()

    def find(self, keys: Sequence[bytes], token_ids: Sequence[int], block_size: int) -> list[int]:
        """The blocks of the longest published prefix, in order.

        keys, token_ids: of one sequence from its start; keys[i] is that of tokens [i * bs, (i+1) * bs).
        A block counts only if its tokens and its parent are the sequence's own: a key that two contents
        share is no hit.
        """
        block_ids = []
        parent_key = ROOT_KEY
        for index, key in enumerate(keys):
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            packed = pack_tokens(token_ids[index * block_size : (index + 1) * block_size])
            if self._entries[block_id] != _Entry(key, parent_key, packed):
                break
            block_ids.append(block_id)
            parent_key = key
        return block_ids

    def stored(self) -> list[Stored]:
        """All that can be found now."""
        return [Stored(entry.key, entry.parent_key) for entry in self._entries.values()]

    def drain_events(self) -> list[CacheEvent]:
        """The changes since the last call, oldest first; [Resync()] in place of too many."""
        events, self._events = self._events, []
        return events

    def _log(self, event: CacheEvent) -> None:
        if self._events == [Resync()]:
            return
        self._events.append(event)
        if len(self._events) == 1:
            self.on_event()
        if len(self._events) > self._max_events:
            self._events = [Resync()]


def _ignore() -> None:
    """Nobody wants to know."""
