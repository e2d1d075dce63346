"""The blocks of the paged cache: free, cached, in use, or waiting for a step to end.

A synchronous core: integers and keys only, no tensor, no clock. Block ids index the first
dimension of the cache; the pool never looks at what is stored there.

    free   --allocate--> used
    used   --release---> fenced  if a running step may still touch the block, else
                         cached  if its content is published, else free
    fenced --complete--> cached or free
    cached --allocate--> used    the least recently used one, and its content is forgotten
    cached --match-----> used    its content is shared; so are used and fenced blocks
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from engine.prefix_index import CacheEvent, PrefixIndex, Stored

DEFAULT_MAX_EVENTS = 16_384


class OutOfBlocks(RuntimeError):
    """allocate() was asked for more blocks than it can give; ask can_allocate() first."""


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1, and remembers the content of full ones as a prefix cache.

    Every block is in one of four places: free; used, with one reference per owner; cached, when
    nobody owns it but its content can be found; fenced, when nobody owns it but a running step may
    still touch it. num_free + num_used + num_fenced == num_blocks, always, and num_cached of
    num_free are cached: what is cached is free to be evicted. A block has several owners only by
    match(), and shared blocks are read only. Every operation costs O(1) per block.

    block_size: tokens per block.
    prefix_cache: False publishes and finds nothing.
    max_events: longest log between two calls of drain_events().
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        max_events: int = DEFAULT_MAX_EVENTS,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot hold anything")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        # A stack: a block released last is likely still in a cache of the device.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: dict[int, int] = {}
        # Least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index = PrefixIndex(max_events)
        # The latest step that may touch a block, while it runs; and the blocks of each such step.
        self._fence_of: dict[int, int] = {}
        self._fenced_by: dict[int, list[int]] = {}
        self._num_fenced = 0

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can give now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns and match() can find; allocate() evicts them last."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns; one with several owners counts once."""
        return len(self._references)

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody owns, but that cannot be given before their step has ended."""
        return self._num_fenced

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether allocate(num_blocks) would succeed."""
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Gives num_blocks blocks of unknown content; the caller owns them until it releases them.

        Takes free blocks first, then evicts cached ones, least recently used first.
        Raises OutOfBlocks, and gives none, if there are fewer.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {self.num_free} of {self.num_blocks} free")
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        self._references.update(dict.fromkeys(block_ids, 1))
        return block_ids

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """The blocks of the longest known prefix; the caller owns one reference to each.

        keys: of the sequence's full blocks from its start (baton.prefix_keys.PrefixKeys). token_ids: at
            least their tokens; compared, so that no key can stand for other tokens.
        To get the logits of the last token leave its block out: pass the keys of all tokens but the last.
        """
        block_ids = self._index.find(keys, token_ids, self.block_size)
        for block_id in block_ids:
            self._pin(block_id)
        return block_ids

    def publish(self, block_id: int, key: bytes, *, parent_key: bytes, token_ids: Sequence[int]) -> bool:
        """Makes the content of a full block findable. It must be complete and never change again.

        The caller owns the block before and after. key, parent_key: by baton.prefix_keys, ROOT_KEY
        before the first. token_ids: the block_size tokens in it.
        Returns whether this block now stands for the key: False if another does (the first one wins) or
        there is no prefix cache. Raises ValueError for a block not in use, not full, or under another key.
        """
        self._check_owned([block_id])
        if len(token_ids) != self.block_size:
            raise ValueError(f"block {block_id} has {len(token_ids)} tokens; only full blocks are published")
        return self.prefix_cache and self._index.add(
            block_id, key, parent_key=parent_key, token_ids=token_ids
        )

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Makes sure that nobody finds these blocks, because their content is not to be trusted.

        The caller owns them before and after; whoever shares them keeps its reference. Raises ValueError
        for a block not in use. Unpublished blocks are left alone.
        """
        unsound = list(block_ids)
        self._check_owned(unsound)
        for block_id in unsound:
            if block_id in self._index:
                self._index.remove(block_id)

    def release(self, block_ids: Iterable[int], fence: int | None = None) -> None:
        """Takes back one reference to each block; without its last one a block is cached or free.

        block_ids: in token order; the last is evicted first, so that prefixes outlive what follows them.
        fence: number of a running step that may still touch them; none of them is given to anybody
            before complete() is called for that step or a later one.
        Raises ValueError, and takes none, if a block is not in use or is named twice.
        """
        released = list(block_ids)
        self._check_owned(released)
        for block_id in reversed(released):
            if fence is not None:
                self._add_fence(block_id, fence)
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
                self._settle(block_id)

    def complete(self, step: int) -> None:
        """Ends the fences of this step and of all before it."""
        for ended in sorted(number for number in self._fenced_by if number <= step):
            for block_id in self._fenced_by.pop(ended):
                if self._fence_of.get(block_id) == ended:
                    self._end_fence(block_id)

    def clear_cache(self) -> None:
        """Forgets all published content; who owns blocks keeps them."""
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def stored(self) -> list[Stored]:
        """All keys that match() can find now, with their parents; the order says nothing."""
        return self._index.stored()

    def tell_of_events(self, on_event: Callable[[], None]) -> None:
        """Names what to call when there is something for drain_events(), once until it is called."""
        self._index.on_event = on_event

    def drain_events(self) -> list[CacheEvent]:
        """What became findable or was removed since the last call, in order.

        [Resync()] alone if that was more than max_events: stored() then tells what there is.
        """
        return self._index.drain_events()

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._index.remove(block_id)
        return block_id

    def _pin(self, block_id: int) -> None:
        if block_id in self._references:
            self._references[block_id] += 1
            return
        if block_id in self._fence_of:
            self._num_fenced -= 1
        else:
            del self._cached[block_id]
        self._references[block_id] = 1

    def _add_fence(self, block_id: int, step: int) -> None:
        # Several owners may leave behind different steps; the latest one holds the block.
        known = self._fence_of.get(block_id)
        if known is None or step > known:
            self._fence_of[block_id] = step
            self._fenced_by.setdefault(step, []).append(block_id)

    def _end_fence(self, block_id: int) -> None:
        del self._fence_of[block_id]
        if block_id not in self._references:
            self._num_fenced -= 1
            self._settle(block_id)

    def _settle(self, block_id: int) -> None:
        """Puts a block that nobody owns where it belongs."""
        if block_id in self._fence_of:
            self._num_fenced += 1
        elif block_id in self._index:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _check_owned(self, block_ids: list[int]) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"a block is named twice in one call: {block_ids}")
        foreign = [block_id for block_id in block_ids if block_id not in self._references]
        if foreign:
            raise ValueError(f"blocks {foreign} are not in use; they were released before or never allocated")
