"""A simulated worker's prefix cache: which numbered blocks it can find, least recently used first to go."""

from __future__ import annotations

from collections.abc import Sequence


class BlockCache:
    """At most num_blocks blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._known: dict[int, None] = {}

    def num_leading(self, blocks: Sequence[int]) -> int:
        """How many of a sequence's blocks, from its start, can be found."""
        return next((index for index, block in enumerate(blocks) if block not in self._known), len(blocks))

    def store(self, blocks: Sequence[int]) -> None:
        """They can be found now, and are the most recently used, of them the first one most."""
        for block in reversed(blocks):
            self._known.pop(block, None)
            self._known[block] = None
        while len(self._known) > self._num_blocks:
            del self._known[next(iter(self._known))]
