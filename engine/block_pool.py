"""The blocks of the paged cache that are free, in use, or waiting for a step to end.

A synchronous core: integers only, no tensor, no clock. Block ids index the first
dimension of the cache; the pool never looks at what is stored there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutOfBlocks(RuntimeError):
    """allocate() was asked for more blocks than are free; ask can_allocate() first."""


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1, each to one owner at a time.

    free + used + fenced == num_blocks, always. A fenced block was released while a
    step that reads or writes it was running; complete() makes it free. Every
    operation costs O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot hold anything")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: a block released last is likely still in a cache of the device.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self._num_fenced = 0

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can give now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return len(self._used)

    @property
    def num_fenced(self) -> int:
        """Blocks released, but not reusable before their step has ended."""
        return self._num_fenced

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether allocate(num_blocks) would succeed."""
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Gives num_blocks blocks; the caller owns them until it releases them.

        Raises OutOfBlocks, and gives none, if fewer are free.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > len(self._free):
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {len(self._free)} of {self.num_blocks} free")
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        self._used.update(block_ids)
        return block_ids

    def release(self, block_ids: Iterable[int], fence: int | None = None) -> None:
        """Takes blocks back from their owner.

        fence: number of a running step that may still touch them; they become free
            when complete() is called for that step or a later one. None: free at once.
        Raises ValueError, and takes none, if a block is not in use or is named twice.
        """
        released = list(block_ids)
        self._check_owned(released)
        self._used.difference_update(released)
        if fence is None:
            self._free.extend(reversed(released))
        elif released:
            self._fenced.append((fence, released))
            self._num_fenced += len(released)

    def complete(self, step: int) -> None:
        """Frees what was fenced by this step or an earlier one. Fences arrive in order of steps."""
        while self._fenced and self._fenced[0][0] <= step:
            _, block_ids = self._fenced.popleft()
            self._num_fenced -= len(block_ids)
            self._free.extend(reversed(block_ids))

    def _check_owned(self, block_ids: list[int]) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"a block is released twice in one call: {block_ids}")
        foreign = [block_id for block_id in block_ids if block_id not in self._used]
        if foreign:
            raise ValueError(f"blocks {foreign} are not in use; they were released before or never allocated")
