"""The block pool against a model of it, in random order: owners, fences, the prefix cache and its log.

The model keeps its own picture of memory: for each block the whole sequence whose last tokens were
written there. A hit must show the matching sequence, whatever was evicted, shared and reused before.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.prefix_keys import ROOT_KEY
from engine.block_pool import BlockPool, OutOfBlocks
from engine.prefix_index import Removed, Resync, Stored

NUM_BLOCKS, BLOCK_SIZE, MAX_EVENTS = 11, 2, 9
Prefix = tuple[int, ...]
# Few different tokens, so that prefixes are often shared; odd lengths leave a block partly filled.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def key_of(prefix: Prefix) -> bytes:
    return repr(prefix).encode() if prefix else ROOT_KEY


def prefixes_of(token_ids: list[int]) -> list[Prefix]:
    """One per full block: all tokens up to its end."""
    return [tuple(token_ids[:end]) for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)]


class PoolMachine(RuleBasedStateMachine):
    """Every block is in one place; a hit is what was stored; a fenced block is never given away."""

    owned = Bundle("owned")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, max_events=MAX_EVENTS)
        self.step = 0
        self.memory: dict[int, Prefix] = {}
        self.owners: Counter[int] = Counter()
        self.fences: dict[int, int] = {}
        self.fence_log: list[tuple[int, int]] = []  # (step, block), as they came
        self.published: dict[Prefix, int] = {}
        self.lru: list[int] = []  # unowned, published, not fenced; the next to go comes first
        self.told: set[bytes] = set()  # a router's index of the pool

    def settle(self, block: int) -> None:
        if not self.owners[block] and block not in self.fences and block in self.published.values():
            self.lru.append(block)

    def taken(self, count: int) -> list[int]:
        """Allocates, and checks who had to go for it."""
        free = NUM_BLOCKS - self.pool.num_used - self.pool.num_fenced - len(self.lru)
        evicted, self.lru = self.lru[: max(0, count - free)], self.lru[max(0, count - free) :]
        blocks = self.pool.allocate(count)
        assert set(evicted) <= set(blocks)
        assert len(set(blocks)) == count
        for block in blocks:
            assert not self.owners[block]
            assert block not in self.fences
            assert block not in self.lru
            self.owners[block] = 1
            self.memory.pop(block, None)
        self.published = {prefix: b for prefix, b in self.published.items() if b not in evicted}
        return blocks

    @rule(target=owned, token_ids=TOKENS)
    def run_a_sequence(self, token_ids: list[int]) -> tuple[int, ...]:
        prefixes = prefixes_of(token_ids)
        hits = self.pool.match([key_of(prefix) for prefix in prefixes], token_ids)
        known = [self.published.get(prefix) for prefix in prefixes]
        assert hits == (known[: known.index(None)] if None in known else known)
        for block, prefix in zip(hits, prefixes, strict=False):
            assert self.memory[block] == prefix
            self.owners[block] += 1
            self.lru = [cached for cached in self.lru if cached != block]
        missing = -(-len(token_ids) // BLOCK_SIZE) - len(hits)
        if not self.pool.can_allocate(missing):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(missing)
            return tuple(hits)
        blocks = hits + self.taken(missing)
        self.store(blocks, prefixes, len(hits))
        return tuple(blocks)

    def store(self, blocks: list[int], prefixes: list[Prefix], num_hits: int) -> None:
        for block, prefix in list(zip(blocks, prefixes, strict=False))[num_hits:]:
            self.memory[block] = prefix
            won = self.pool.publish(
                block,
                key_of(prefix),
                parent_key=key_of(prefix[:-BLOCK_SIZE]),
                token_ids=prefix[-BLOCK_SIZE:],
            )
            assert won == (self.published.setdefault(prefix, block) == block)

    @rule(blocks=consumes(owned), advance=st.none() | st.integers(0, 2))
    def release(self, blocks: tuple[int, ...], advance: int | None) -> None:
        fence = None if advance is None else self.step + advance
        self.step = self.step if fence is None else fence
        self.pool.release(blocks, fence=fence)
        for block in reversed(blocks):
            self.owners[block] -= 1
            if fence is not None and self.fences.get(block, fence - 1) < fence:
                self.fences[block] = fence
                self.fence_log.append((fence, block))
            self.settle(block)

    @rule(lag=st.integers(0, 2))
    def complete(self, lag: int) -> None:
        self.pool.complete(self.step - lag)
        for step, block in sorted(self.fence_log, key=lambda entry: entry[0]):
            if step <= self.step - lag and self.fences.get(block) == step:
                del self.fences[block]
                self.settle(block)

    @rule(blocks=owned)
    def unpublish(self, blocks: tuple[int, ...]) -> None:
        if all(self.owners[block] for block in blocks):
            self.pool.unpublish(blocks)
            self.published = {prefix: b for prefix, b in self.published.items() if b not in blocks}

    @rule(sure=st.sampled_from([False] * 9 + [True]))
    def clear_cache(self, sure: bool) -> None:
        if sure:
            self.pool.clear_cache()
            self.published, self.lru = {}, []

    @rule()
    def tell_the_router(self) -> None:
        for event in self.pool.drain_events():
            match event:
                case Resync():
                    self.told = {stored.key for stored in self.pool.stored()}
                case Stored(key, _):
                    assert key not in self.told
                    self.told.add(key)
                case Removed(key):
                    self.told.remove(key)
        assert self.told == {key_of(prefix) for prefix in self.published}
        assert set(self.pool.stored()) == {
            Stored(key_of(prefix), key_of(prefix[:-BLOCK_SIZE])) for prefix in self.published
        }

    @rule(block=st.integers(-3, NUM_BLOCKS + 3))
    def release_what_nobody_owns(self, block: int) -> None:
        if not self.owners[block]:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.release([block])

    @invariant()
    def every_block_is_somewhere(self) -> None:
        used = {block for block, count in self.owners.items() if count}
        fenced = set(self.fences) - used
        assert (self.pool.num_used, self.pool.num_fenced) == (len(used), len(fenced))
        assert self.pool.num_cached == len(self.lru)
        assert self.pool.num_free == NUM_BLOCKS - len(used) - len(fenced)
        assert self.pool.can_allocate(self.pool.num_free)
        assert not self.pool.can_allocate(self.pool.num_free + 1)

    def teardown(self) -> None:
        self.pool.complete(self.step)
        for block, count in self.owners.items():
            for _ in range(count):
                self.pool.release([block])
        assert self.pool.num_free == NUM_BLOCKS
        assert sorted(self.pool.allocate(NUM_BLOCKS)) == list(range(NUM_BLOCKS))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
