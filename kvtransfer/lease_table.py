"""LeaseTable: who may write into which reserved blocks, and until when.

The decode worker's event loop owns one table and is the only arbiter of a
lease. Whoever reaches the table first wins; every later caller gets the same
answer.

                 accept                 commit                  release
    RESERVED ------------> RECEIVING ------------> COMMITTED ------------> RELEASED
        |     <------------    |                       |      (or expire)     ^
        |        rewind        |                                              |
        +----------------------+----------------------------------------------+
              release, abort_if_uncommitted, expire: blocks return to the pool

Block ownership: RESERVED and RECEIVING leases own one reference to each of their
blocks, matched ones included, and return them to the pool. commit() hands them to
the caller (the decode request); from then on the table never touches them.

Renewals cover COMMITTED leases too: the entry stays until the request ends,
because a lost router must stop its decoding requests as well. expire() returns
such leases, and the caller cancels their requests.

A lease lives until `expires_at`, exactly: at that time accept, commit and renew
refuse it even if expire() has not run yet. Frames are scattered synchronously
on the same event loop, so no block is ever freed in the middle of a scatter.

Must not know asyncio, clocks, torch or the wire. `now` is in seconds and never
decreases; ids come from the random.Random given to the constructor
(random.SystemRandom() in production).
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Generic, TypeVar

from baton.errors import BatonError, Cancelled, InvalidRequest, Overloaded
from engine.block_pool import BlockPool
from kvtransfer.contract import Committed, Gone, GoneReason, Outcome

PayloadT = TypeVar("PayloadT")


class LeaseState(Enum):
    """Where a lease is; the transitions are drawn at the top of this module."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RELEASED = "released"


@dataclass(slots=True, eq=False, kw_only=True)
class Lease(Generic[PayloadT]):
    """A reservation. Fields are read by everyone and written by LeaseTable alone.

    lease_id: the ticket, 16 random bytes.
    block_ids: owned by the table until commit, by the payload's owner afterwards.
    num_tokens: tokens whose KV the transfer must deliver, counted from the
        start of the sequence, held tokens included.
    num_held_tokens: leading tokens already in the blocks; never overwritten.
    on_ended: called once, synchronously, when an uncommitted lease is released,
        so that a silent sender's stream can be ended without polling.
    """

    # Neither the ticket nor what a user sent may slip into a log with the lease.
    lease_id: bytes = field(repr=False)
    attempt_id: bytes
    block_ids: list[int]
    num_tokens: int
    num_held_tokens: int
    expires_at: float
    payload: PayloadT = field(repr=False)
    state: LeaseState = LeaseState.RESERVED
    on_ended: Callable[[Gone], None] | None = field(default=None, repr=False)

    @property
    def is_uncommitted(self) -> bool:
        """Whether the table still owns the blocks."""
        return self.state in (LeaseState.RESERVED, LeaseState.RECEIVING)


@dataclass(frozen=True, slots=True)
class Refusal:
    """No reservation, and why: Overloaded (with a retry hint), InvalidRequest or Cancelled."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class _Tombstone:
    outcome: Outcome
    until: float


class LeaseTable(Generic[PayloadT]):
    """Leases over one BlockPool, with tombstones for attempts that have ended.

    ttl_s: a lease not renewed for that long expires.
    tombstone_s: an ended attempt is remembered, and refused, for that long.
    retry_after_s: hint given with Overloaded.
    max_tombstones: above it the oldest are forgotten first.
    num_expired: leases that were not renewed in time, since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        rng: Random,
        ttl_s: float = 10.0,
        tombstone_s: float = 30.0,
        retry_after_s: float = 0.1,
        max_tombstones: int = 100_000,
    ) -> None:
        self._pool = pool
        self._rng = rng
        self.ttl_s = ttl_s
        self._tombstone_s = tombstone_s
        self._retry_after_s = retry_after_s
        self._max_tombstones = max_tombstones
        # Both are ordered by deadline: entries are appended, or moved to the end,
        # with now + a constant, and now never decreases.
        self._leases: OrderedDict[bytes, Lease[PayloadT]] = OrderedDict()
        self._tombstones: OrderedDict[bytes, _Tombstone] = OrderedDict()
        self._num_refused_writes = 0
        self.num_expired = 0

    @property
    def num_leases(self) -> int:
        """Leases that are not yet released, committed ones included."""
        return len(self._leases)

    @property
    def num_uncommitted(self) -> int:
        """Leases whose KV has not been committed."""
        return sum(lease.is_uncommitted for lease in self._leases.values())

    @property
    def num_reserved_blocks(self) -> int:
        """Block references the table owns; a block that two leases share counts twice."""
        return sum(len(lease.block_ids) for lease in self._leases.values() if lease.is_uncommitted)

    @property
    def num_tombstones(self) -> int:
        """Ended attempts that are still remembered."""
        return len(self._tombstones)

    @property
    def num_refused_writes(self) -> int:
        """Writes and frames refused since the start."""
        return self._num_refused_writes

    def get(self, attempt_id: bytes) -> Lease[PayloadT] | None:
        """The unreleased lease of an attempt, or None."""
        return self._leases.get(attempt_id)

    def reserve(
        self,
        attempt_id: bytes,
        payload: PayloadT,
        *,
        num_blocks: int,
        num_tokens: int,
        now: float,
        held_block_ids: Sequence[int] = (),
        num_blocks_in_all: int | None = None,
        watermark_blocks: int = 0,
    ) -> Lease[PayloadT] | Refusal:
        """Gives an attempt num_blocks blocks, held ones included, or says why not.

        held_block_ids: the sequence's first blocks, pinned by BlockPool.match(). The lease owns them from
            here on; after a refusal, or an exception, they are still the caller's to release.
        num_blocks_in_all: most that the request can ever grow to; None: it never grows beyond num_blocks.
        watermark_blocks: must stay free beyond the reservation, for requests that grow. Less is enough
            where the pool is too small for both, so that whatever fits alone is admitted in the end.
        Refuses with InvalidRequest what could not even finish alone, with Overloaded what must wait, with
        Cancelled an attempt that has ended. Raises ValueError for more held blocks than the request has.
        """
        num_held_tokens = len(held_block_ids) * self._pool.block_size
        if len(held_block_ids) > num_blocks or num_held_tokens > num_tokens:
            raise ValueError(f"{num_held_tokens} held tokens for a request that stores {num_tokens}")
        num_new = num_blocks - len(held_block_ids)
        watermark = min(watermark_blocks, max(0, self._pool.num_blocks - num_blocks))
        error = self._objection(attempt_id, now)
        error = error or self._too_large(max(num_blocks, num_blocks_in_all or 0))
        error = error or self._no_room(num_new, watermark)
        if error is not None:
            return Refusal(error)
        lease = Lease(
            lease_id=self._rng.getrandbits(128).to_bytes(16, "little"),
            attempt_id=attempt_id,
            block_ids=[*held_block_ids, *self._pool.allocate(num_new)],
            num_tokens=num_tokens,
            num_held_tokens=num_held_tokens,
            expires_at=now + self.ttl_s,
            payload=payload,
        )
        self._leases[attempt_id] = lease
        return lease

    def _objection(self, attempt_id: bytes, now: float) -> BatonError | None:
        self._forget_tombstones(now)
        if attempt_id in self._tombstones:
            return Cancelled("the attempt has ended here; use a new attempt_id")
        if attempt_id in self._leases:
            return InvalidRequest("the attempt has a lease already; use a new one", field="attempt_id")
        return None

    def _too_large(self, num_blocks: int) -> InvalidRequest | None:
        if num_blocks <= self._pool.num_blocks:
            return None
        return InvalidRequest(
            f"the request needs {num_blocks} blocks and this worker has {self._pool.num_blocks} in all; "
            "send a shorter prompt, lower max_tokens or raise kv_cache_bytes",
            field="max_tokens",
        )

    def _no_room(self, num_blocks: int, watermark: int) -> Overloaded | None:
        if self._pool.can_allocate(num_blocks + watermark):
            return None
        return Overloaded(
            f"the request needs {num_blocks} blocks and {self._pool.num_free} are free, of which {watermark} "
            "are kept for running requests",
            retry_after_s=self._retry_after_s,
        )

    def renew(self, attempt_ids: Iterable[bytes], now: float) -> None:
        """Extends the leases of these attempts to now + ttl_s; unknown attempts are ignored."""
        for attempt_id in attempt_ids:
            lease = self._leases.get(attempt_id)
            if lease is not None and now < lease.expires_at:
                lease.expires_at = now + self.ttl_s
                self._leases.move_to_end(attempt_id)

    def accept(self, lease_id: bytes, attempt_id: bytes, now: float) -> Lease[PayloadT] | Gone:
        """Admits a write: RESERVED or RECEIVING becomes RECEIVING.

        A COMMITTED lease is returned as it is, so that a sender which missed the
        answer gets it again. Everything else is Gone, and counted. The
        incarnation is the receiver's to check; it knows its own.
        """
        lease = self._leases.get(attempt_id)
        if lease is None or not hmac.compare_digest(lease.lease_id, lease_id):
            return self.refuse(self._missing(lease_id, attempt_id))
        if now >= lease.expires_at:
            return self.refuse(Gone(GoneReason.EXPIRED))
        if lease.is_uncommitted:
            lease.state = LeaseState.RECEIVING
        return lease

    def _missing(self, lease_id: bytes, attempt_id: bytes) -> Gone:
        tombstone = self._tombstones.get(attempt_id)
        if tombstone is not None and isinstance(tombstone.outcome, Gone):
            return tombstone.outcome
        other = any(hmac.compare_digest(lease.lease_id, lease_id) for lease in self._leases.values())
        return Gone(GoneReason.FENCED if other else GoneReason.UNKNOWN)

    def refuse(self, gone: Gone) -> Gone:
        """Counts a refused write and returns its answer."""
        self._num_refused_writes += 1
        return gone

    def check(self, lease: Lease[PayloadT], now: float) -> Gone | None:
        """None while the lease may take a frame; otherwise, counted, why it may not."""
        if not lease.is_uncommitted:
            return self.refuse(self._ended(lease))
        if now >= lease.expires_at:
            return self.refuse(Gone(GoneReason.EXPIRED))
        return None

    def rewind(self, lease: Lease[PayloadT]) -> None:
        """Its stream ended before the commit: a new stream may start from scratch.

        The lease itself lives until it is released or expires; the router decides.
        """
        if lease.state is LeaseState.RECEIVING:
            lease.state = LeaseState.RESERVED

    def commit(self, lease: Lease[PayloadT], now: float) -> Outcome:
        """Hands the blocks to the caller; idempotent. Gone if the lease ended first."""
        if lease.state is LeaseState.COMMITTED:
            return Committed()
        gone = self.check(lease, now)
        if gone is not None:
            return gone
        lease.state = LeaseState.COMMITTED
        lease.on_ended = None
        return Committed()

    def _ended(self, lease: Lease[PayloadT]) -> Gone:
        tombstone = self._tombstones.get(lease.attempt_id)
        if tombstone is not None and isinstance(tombstone.outcome, Gone):
            return tombstone.outcome
        return Gone(GoneReason.UNKNOWN)

    def abort_if_uncommitted(self, attempt_id: bytes, now: float) -> Outcome:
        """Releases the lease unless it is committed; the answer holds for the tombstone's life.

        Committed also for a committed request that has finished since.
        """
        lease = self._leases.get(attempt_id)
        if lease is not None and not lease.is_uncommitted:
            return Committed()
        expired = lease is not None and now >= lease.expires_at
        self.release(attempt_id, GoneReason.EXPIRED if expired else GoneReason.CANCELLED, now)
        return self._tombstones[attempt_id].outcome

    def release(self, attempt_id: bytes, reason: GoneReason, now: float) -> Lease[PayloadT] | None:
        """Ends an attempt and leaves a tombstone; idempotent.

        Blocks of an uncommitted lease return to the pool. A committed lease is
        only forgotten: the caller owns its blocks. An unknown attempt leaves a
        tombstone too, so that a Reserve that arrives later is refused. Returns
        the lease if there was one.
        """
        self._forget_tombstones(now)
        lease = self._leases.pop(attempt_id, None)
        if lease is None:
            self._bury(attempt_id, Gone(reason), now)
            return None
        outcome: Outcome = Gone(reason) if lease.is_uncommitted else Committed()
        self._bury(attempt_id, outcome, now)
        self._end(lease, outcome)
        return lease

    def _end(self, lease: Lease[PayloadT], outcome: Outcome) -> None:
        lease.state = LeaseState.RELEASED
        if isinstance(outcome, Committed):
            return
        # Nobody writes an uncommitted lease's blocks now. A step may read those it shares: their other
        # owner's release carries that fence.
        self._pool.release(lease.block_ids)
        on_ended, lease.on_ended = lease.on_ended, None
        if on_ended is not None:
            on_ended(outcome)

    def _bury(self, attempt_id: bytes, outcome: Outcome, now: float) -> None:
        self._tombstones.setdefault(attempt_id, _Tombstone(outcome, now + self._tombstone_s))
        if len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)

    def expire(self, now: float) -> list[Lease[PayloadT]]:
        """Releases the leases that were not renewed in time and returns them, committed ones too.

        The caller cancels the requests of those whose blocks it owns. Old
        tombstones are forgotten.
        """
        expired: list[Lease[PayloadT]] = []
        while self._leases and (lease := next(iter(self._leases.values()))).expires_at <= now:
            self.release(lease.attempt_id, GoneReason.EXPIRED, now)
            expired.append(lease)
            self.num_expired += 1
        self._forget_tombstones(now)
        return expired

    def _forget_tombstones(self, now: float) -> None:
        while self._tombstones and next(iter(self._tombstones.values())).until <= now:
            self._tombstones.popitem(last=False)

    def next_deadline(self) -> float | None:
        """When expire() has something to do next, in seconds; None if never."""
        deadlines = [lease.expires_at for lease in list(self._leases.values())[:1]]
        deadlines += [tombstone.until for tombstone in list(self._tombstones.values())[:1]]
        return min(deadlines, default=None)
