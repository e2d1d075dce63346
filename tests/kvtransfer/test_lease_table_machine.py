"""The books of leases and blocks under random use."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.block_pool import BlockPool
from kvtransfer.contract import Committed, GoneReason
from kvtransfer.lease_table import Lease, LeaseState, LeaseTable, Refusal
from tests.kvtransfer.cached_prefix import cached_prefix


class LeaseMachine(RuleBasedStateMachine):
    """Random calls in random order; the pool's books must balance after each."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(6, 16)
        self.table: LeaseTable[None] = LeaseTable(self.pool, rng=random.Random(5), ttl_s=10, tombstone_s=30)
        self.now = 0.0
        self.leases: list[Lease[None]] = []
        self.owned: dict[bytes, list[int]] = {}  # blocks this caller got by commit
        self.matched: set[int] = set()

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 11.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        name=st.integers(0, 5),
        num_blocks=st.integers(0, 7),
        num_held=st.integers(0, 2),
        grows_by=st.integers(0, 3),
        watermark=st.integers(0, 2),
    )
    def reserve(self, name: int, num_blocks: int, num_held: int, grows_by: int, watermark: int) -> None:
        held = cached_prefix(self.pool, num_held) if self.pool.num_free >= num_held <= num_blocks else []
        num_free, num_used = self.pool.num_free, self.pool.num_used
        answer = self.table.reserve(
            bytes([name]),
            None,
            num_blocks=num_blocks,
            num_tokens=num_blocks * 16,
            held_block_ids=held,
            num_blocks_in_all=num_blocks + grows_by,
            watermark_blocks=watermark,
            now=self.now,
        )
        if isinstance(answer, Refusal):
            assert self.pool.num_used == num_used
            self.pool.release(held)
            return
        self.leases.append(answer)
        self.matched.update(held)
        assert answer.block_ids[: len(held)] == held
        assert num_blocks + grows_by <= 6
        assert self.pool.num_free == num_free - (num_blocks - len(held))
        assert self.pool.num_free >= min(watermark, 6 - num_blocks)

    @rule(name=st.integers(0, 5))
    def renew(self, name: int) -> None:
        self.table.renew([bytes([name])], self.now)

    @rule(data=st.data())
    def accept_or_commit(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases))
        was_live = lease.is_uncommitted and self.now < lease.expires_at
        if data.draw(st.booleans()):
            self.table.accept(lease.lease_id, lease.attempt_id, self.now)
            return
        outcome = self.table.commit(lease, self.now)
        assert (outcome == Committed()) == (was_live or lease.state is LeaseState.COMMITTED)
        if was_live:
            self.owned[lease.attempt_id] = list(lease.block_ids)

    @rule(name=st.integers(0, 5), abort=st.booleans())
    def end(self, name: int, abort: bool) -> None:
        attempt_id = bytes([name])
        if abort:
            self.table.abort_if_uncommitted(attempt_id, self.now)
            return
        lease = self.table.release(attempt_id, GoneReason.CANCELLED, self.now)
        if lease is not None:
            self.pool.release(self.owned.pop(attempt_id, []))
        assert self.table.num_tombstones > 0

    @rule()
    def expire(self) -> None:
        for lease in self.table.expire(self.now):
            self.pool.release(self.owned.pop(lease.attempt_id, []))
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.now

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.num_leases == sum(lease.state is not LeaseState.RELEASED for lease in self.leases)
        blocks = [b for lease in self.leases if lease.is_uncommitted for b in lease.block_ids]
        assert self.table.num_reserved_blocks == len(blocks)
        blocks += [b for ids in self.owned.values() for b in ids]
        assert self.pool.num_used == len(set(blocks)) == 6 - self.pool.num_free
        # Only what was matched has several owners.
        assert {b for b in blocks if blocks.count(b) > 1} <= self.matched

    def teardown(self) -> None:
        for _ in range(2):  # leases end first, their tombstones later
            self.now += 1000
            self.expire()
        assert (self.pool.num_free, self.table.num_leases, self.table.num_tombstones) == (6, 0, 0)


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
