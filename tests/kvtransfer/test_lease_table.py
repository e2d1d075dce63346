"""The arbiter of leases: its races decided, and who owns which blocks."""

from __future__ import annotations

import random

import pytest

from baton.errors import Cancelled, InvalidRequest, Overloaded
from engine.block_pool import BlockPool
from kvtransfer.contract import Committed, Gone, GoneReason
from kvtransfer.lease_table import Lease, LeaseState, LeaseTable, Refusal
from tests.kvtransfer.cached_prefix import cached_prefix

A, B, C = b"attempt-a", b"attempt-b", b"attempt-c"


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, 16)


@pytest.fixture
def table(pool: BlockPool) -> LeaseTable[str]:
    return LeaseTable(pool, rng=random.Random(3), ttl_s=10, tombstone_s=30, retry_after_s=0.5)


def reserve(table: LeaseTable[str], attempt_id: bytes, num_blocks: int = 2, now: float = 0.0) -> Lease[str]:
    lease = table.reserve(attempt_id, "request", num_blocks=num_blocks, num_tokens=num_blocks * 16, now=now)
    assert isinstance(lease, Lease)
    return lease


def refusal(table: LeaseTable[str], attempt_id: bytes, num_blocks: int = 2, now: float = 0.0) -> Refusal:
    answer = table.reserve(attempt_id, "request", num_blocks=num_blocks, num_tokens=16, now=now)
    assert isinstance(answer, Refusal)
    return answer


def test_a_reservation_takes_blocks_and_gives_a_ticket(table: LeaseTable[str], pool: BlockPool) -> None:
    lease, other = reserve(table, A, 3), reserve(table, B, 2)
    assert (len(lease.lease_id), len(lease.block_ids), lease.payload) == (16, 3, "request")
    assert lease.lease_id != other.lease_id
    assert set(lease.block_ids).isdisjoint(other.block_ids)
    assert lease.state is LeaseState.RESERVED
    assert (table.num_leases, table.num_reserved_blocks, pool.num_free) == (2, 5, 3)


def test_a_full_pool_refuses_with_a_retry_hint(table: LeaseTable[str], pool: BlockPool) -> None:
    reserve(table, A, 7)
    error = refusal(table, B, 2).error
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 0.5
    assert pool.num_free == 1


def test_what_never_fits_is_an_invalid_request(table: LeaseTable[str]) -> None:
    error = refusal(table, A, 9).error
    assert isinstance(error, InvalidRequest)
    assert "9 blocks and this worker has 8 in all" in error.message


def test_what_could_never_grow_to_its_end_is_an_invalid_request(table: LeaseTable[str]) -> None:
    answer = table.reserve(A, "request", num_blocks=2, num_tokens=32, num_blocks_in_all=9, now=0.0)
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, InvalidRequest)
    assert answer.error.field == "max_tokens"
    assert isinstance(
        table.reserve(A, "request", num_blocks=2, num_tokens=32, num_blocks_in_all=8, now=0.0), Lease
    )


def test_admission_keeps_blocks_for_requests_that_grow(table: LeaseTable[str], pool: BlockPool) -> None:
    def ask(attempt_id: bytes, num_blocks: int) -> Lease[str] | Refusal:
        return table.reserve(
            attempt_id, "request", num_blocks=num_blocks, num_tokens=1, watermark_blocks=3, now=0.0
        )

    assert isinstance(ask(A, 3), Lease)
    refused = ask(B, 3)
    assert isinstance(refused, Refusal)
    assert isinstance(refused.error, Overloaded)
    assert "needs 3 blocks and 5 are free, of which 3 are kept" in refused.error.message
    assert isinstance(ask(B, 2), Lease)
    assert pool.num_free == 3


def test_an_idle_pool_admits_whatever_fits_alone(table: LeaseTable[str], pool: BlockPool) -> None:
    lease = table.reserve(A, "request", num_blocks=7, num_tokens=112, watermark_blocks=3, now=0.0)
    assert isinstance(lease, Lease)
    table.release(A, GoneReason.CANCELLED, 1.0)
    held = pool.allocate(2)
    lease = table.reserve(
        B, "request", num_blocks=8, num_tokens=128, held_block_ids=held, watermark_blocks=3, now=2.0
    )
    assert isinstance(lease, Lease)
    assert pool.num_free == 0


def test_held_blocks_come_first_and_go_with_the_lease(table: LeaseTable[str], pool: BlockPool) -> None:
    held = cached_prefix(pool, 3)
    lease = table.reserve(A, "request", num_blocks=5, num_tokens=70, held_block_ids=held, now=0.0)
    assert isinstance(lease, Lease)
    assert (lease.block_ids[:3], len(lease.block_ids), lease.num_held_tokens) == (held, 5, 48)
    assert pool.num_used == 5
    table.release(A, GoneReason.CANCELLED, 1.0)
    # What was found is still there to be found; what was new holds nothing.
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 3, 8)


def test_a_refusal_leaves_the_held_blocks_with_the_caller(table: LeaseTable[str], pool: BlockPool) -> None:
    held = cached_prefix(pool, 2)
    others = pool.allocate(4)
    for num_blocks, in_all in ((5, None), (3, 9)):
        answer = table.reserve(
            A, "request", num_blocks=num_blocks, num_tokens=40, held_block_ids=held,
            num_blocks_in_all=in_all, now=0.0,
        )  # fmt: skip
        assert isinstance(answer, Refusal)
        assert (pool.num_used, pool.num_cached) == (6, 0)
    pool.release(held)
    pool.release(others)
    assert (pool.num_used, pool.num_cached) == (0, 2)


def test_more_held_than_needed_is_a_defect(table: LeaseTable[str], pool: BlockPool) -> None:
    held = pool.allocate(2)
    for num_blocks, num_tokens in ((1, 40), (3, 31)):
        with pytest.raises(ValueError, match="32 held tokens"):
            table.reserve(
                A, "request", num_blocks=num_blocks, num_tokens=num_tokens, held_block_ids=held, now=0.0
            )
    assert (pool.num_used, table.num_leases) == (2, 0)


def test_an_attempt_has_one_lease(table: LeaseTable[str]) -> None:
    reserve(table, A)
    error = refusal(table, A).error
    assert isinstance(error, InvalidRequest)
    assert error.field == "attempt_id"


def test_a_cancel_that_overtakes_its_reserve_leaves_a_tombstone(table: LeaseTable[str]) -> None:
    assert table.release(A, GoneReason.CANCELLED, now=0.0) is None
    assert isinstance(refusal(table, A, now=29.9).error, Cancelled)
    assert isinstance(reserve(table, A, now=30.0), Lease)


def test_release_returns_the_blocks_once(table: LeaseTable[str], pool: BlockPool) -> None:
    lease = reserve(table, A)
    assert table.release(A, GoneReason.CANCELLED, 1.0) is lease
    assert (pool.num_free, table.num_leases, lease.state) == (8, 0, LeaseState.RELEASED)
    assert table.release(A, GoneReason.FAILED, 2.0) is None
    assert pool.num_free == 8
    assert table.accept(lease.lease_id, A, 3.0) == Gone(GoneReason.CANCELLED)


def test_only_the_ticket_of_the_same_attempt_is_accepted(table: LeaseTable[str]) -> None:
    lease, other = reserve(table, A), reserve(table, B)
    assert table.accept(bytes(16), A, 0.0) == Gone(GoneReason.UNKNOWN)
    assert table.accept(b"", A, 0.0) == Gone(GoneReason.UNKNOWN)
    assert table.accept(other.lease_id, A, 0.0) == Gone(GoneReason.FENCED)
    assert table.accept(lease.lease_id, C, 0.0) == Gone(GoneReason.FENCED)
    assert table.num_refused_writes == 4
    assert table.accept(lease.lease_id, A, 0.0) is lease
    assert lease.state is LeaseState.RECEIVING


def test_a_lease_ends_exactly_at_its_deadline(table: LeaseTable[str], pool: BlockPool) -> None:
    lease = reserve(table, A)
    assert table.accept(lease.lease_id, A, 9.999) is lease
    assert table.check(lease, 9.999) is None
    assert table.accept(lease.lease_id, A, 10.0) == Gone(GoneReason.EXPIRED)
    assert table.check(lease, 10.0) == Gone(GoneReason.EXPIRED)
    assert table.commit(lease, 10.0) == Gone(GoneReason.EXPIRED)
    table.renew([A], 10.0)
    assert table.expire(10.0) == [lease]
    assert pool.num_free == 8
    assert table.accept(lease.lease_id, A, 11.0) == Gone(GoneReason.EXPIRED)


def test_renewals_keep_leases_alive_and_reorder_the_deadlines(table: LeaseTable[str]) -> None:
    first, second = reserve(table, A), reserve(table, B, now=1.0)
    assert table.next_deadline() == 10.0
    table.renew([A, C], 5.0)
    assert table.next_deadline() == 11.0
    assert table.expire(11.0) == [second]
    assert table.next_deadline() == 15.0
    assert table.expire(15.0) == [first]
    assert table.next_deadline() == 41.0  # the tombstone of B
    assert table.expire(45.0) == []
    assert (table.next_deadline(), table.num_tombstones) == (None, 0)


def test_commit_hands_the_blocks_over(table: LeaseTable[str], pool: BlockPool) -> None:
    lease = reserve(table, A)
    table.accept(lease.lease_id, A, 1.0)
    assert table.commit(lease, 1.0) == Committed()
    assert table.commit(lease, 1.0) == Committed()
    assert (table.num_reserved_blocks, table.num_uncommitted, table.num_leases) == (0, 0, 1)
    assert table.accept(lease.lease_id, A, 2.0) is lease  # a sender that missed the answer
    assert lease.state is LeaseState.COMMITTED
    assert table.check(lease, 2.0) == Gone(GoneReason.UNKNOWN)  # but no frame any more
    assert table.release(A, GoneReason.CANCELLED, 3.0) is lease
    assert pool.num_free == 6  # they are the caller's
    pool.release(lease.block_ids)


def test_a_committed_lease_expires_with_its_router_and_its_blocks_stay_the_callers(
    table: LeaseTable[str], pool: BlockPool
) -> None:
    lease = reserve(table, A)
    table.commit(lease, 1.0)
    table.renew([A], 5.0)
    assert table.expire(14.9) == []
    assert table.expire(15.0) == [lease]
    assert (pool.num_free, table.num_leases) == (6, 0)


def test_abort_and_commit_whoever_comes_first_wins(table: LeaseTable[str], pool: BlockPool) -> None:
    aborted, committed = reserve(table, A), reserve(table, B)
    assert table.abort_if_uncommitted(A, 1.0) == Gone(GoneReason.CANCELLED)
    assert table.commit(aborted, 1.0) == Gone(GoneReason.CANCELLED)
    assert table.abort_if_uncommitted(A, 2.0) == Gone(GoneReason.CANCELLED)
    table.commit(committed, 1.0)
    assert table.abort_if_uncommitted(B, 1.0) == Committed()
    assert committed.state is LeaseState.COMMITTED
    table.release(B, GoneReason.CANCELLED, 2.0)
    assert table.abort_if_uncommitted(B, 3.0) == Committed()  # it was, and has finished since
    assert table.abort_if_uncommitted(C, 3.0) == Gone(GoneReason.CANCELLED)
    assert isinstance(refusal(table, C, now=4.0).error, Cancelled)
    assert pool.num_free == 6


def test_an_abort_after_the_deadline_says_expired(table: LeaseTable[str]) -> None:
    reserve(table, A)
    assert table.abort_if_uncommitted(A, 10.0) == Gone(GoneReason.EXPIRED)


def test_a_lost_stream_leaves_the_lease_for_another(table: LeaseTable[str]) -> None:
    lease = reserve(table, A)
    table.accept(lease.lease_id, A, 1.0)
    table.rewind(lease)
    assert lease.state is LeaseState.RESERVED
    assert table.accept(lease.lease_id, A, 2.0) is lease
    table.commit(lease, 2.0)
    table.rewind(lease)
    assert lease.state is LeaseState.COMMITTED


def test_the_stream_of_a_lease_hears_of_its_end_once(table: LeaseTable[str]) -> None:
    heard: list[Gone] = []
    lease, committed = reserve(table, A), reserve(table, B)
    lease.on_ended = committed.on_ended = heard.append
    table.commit(committed, 0.0)
    table.release(B, GoneReason.CANCELLED, 1.0)
    assert heard == []
    table.expire(10.0)
    table.release(A, GoneReason.CANCELLED, 11.0)
    assert heard == [Gone(GoneReason.EXPIRED)]


def test_tombstones_are_bounded(pool: BlockPool) -> None:
    table: LeaseTable[str] = LeaseTable(pool, rng=random.Random(3), max_tombstones=2)
    for attempt_id in (A, B, C):
        table.release(attempt_id, GoneReason.CANCELLED, 0.0)
    assert table.num_tombstones == 2
    assert isinstance(reserve(table, A), Lease)
    assert isinstance(refusal(table, C).error, Cancelled)


def test_a_printed_lease_shows_neither_ticket_nor_request(table: LeaseTable[str]) -> None:
    lease = reserve(table, A)
    assert repr(lease.lease_id) not in repr(lease)
    assert "request" not in repr(lease)
