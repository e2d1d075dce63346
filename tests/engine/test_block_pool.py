"""The block pool against a model of it: sets of blocks by owner and by fence."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.block_pool import BlockPool, OutOfBlocks

NUM_BLOCKS = 17


class PoolMachine(RuleBasedStateMachine):
    """Every block is in exactly one place, and a fenced one never comes back early."""

    owned = Bundle("owned")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.used: set[int] = set()
        self.fenced: dict[int, int] = {}
        self.step = 0

    @rule(target=owned, count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> tuple[int, ...]:
        free = NUM_BLOCKS - len(self.used) - len(self.fenced)
        assert self.pool.can_allocate(count) is (count <= free)
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return ()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert set(blocks) <= set(range(NUM_BLOCKS))
        assert not set(blocks) & (self.used | set(self.fenced))
        self.used |= set(blocks)
        return tuple(blocks)

    @rule(blocks=consumes(owned))
    def release(self, blocks: tuple[int, ...]) -> None:
        self.pool.release(blocks)
        self.used -= set(blocks)

    @rule(blocks=consumes(owned), advance=st.integers(0, 2))
    def release_behind_a_step(self, blocks: tuple[int, ...], advance: int) -> None:
        self.step += advance
        self.pool.release(blocks, fence=self.step)
        self.used -= set(blocks)
        self.fenced |= dict.fromkeys(blocks, self.step)

    @rule(lag=st.integers(0, 3))
    def complete(self, lag: int) -> None:
        self.pool.complete(self.step - lag)
        self.fenced = {block: step for block, step in self.fenced.items() if step > self.step - lag}

    @rule(block=st.integers(-3, NUM_BLOCKS + 3))
    def release_what_nobody_owns(self, block: int) -> None:
        if block not in self.used:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.release([block])

    @invariant()
    def every_block_is_somewhere(self) -> None:
        assert self.pool.num_used == len(self.used)
        assert self.pool.num_fenced == len(self.fenced)
        assert self.pool.num_free == NUM_BLOCKS - len(self.used) - len(self.fenced)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_failed_release_takes_nothing() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)

    with pytest.raises(ValueError, match="twice"):
        pool.release([first, first])
    with pytest.raises(ValueError, match="not in use"):
        pool.release([second, 99])

    assert pool.num_used == 2


def test_a_pool_needs_room() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0, 16)
