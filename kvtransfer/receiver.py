"""KvReceiver: takes writes into leased blocks, on the decode worker's event loop.

Owns: admission of a write, verification of its frames, what has arrived, and the
commit. One IncomingWrite per open stream. Must not know gRPC or asyncio: every
call is synchronous and gets `now` in seconds, so a frame is verified, checked
against its lease and scattered without anything else running in between.

    open() --> IncomingWrite       frame()* commit() [frame()* commit()]* close()
           --> Committed | Gone    answered at once

A frame that fails verification is dropped and counted: its header cannot be
trusted either. The commit names the number of frames, so what is missing is
known then, and asked for again. A stream that ends before its commit leaves the
lease as it was: a new stream may start from scratch, and whether it is worth
waiting for is the router's decision (AbortIfUncommitted). A newer stream for the
same lease fences the older one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from baton.errors import IncompatiblePeer
from baton.limits import blocks_needed
from engine.kv_cache import KVCache
from kvtransfer.contract import (
    MAX_PAYLOAD_BYTES,
    Answer,
    Committed,
    FirstToken,
    Gone,
    GoneReason,
    KvFormat,
    Outcome,
    Resend,
    Ticket,
)
from kvtransfer.device_writer import writer_of
from kvtransfer.lease_table import Lease, LeaseState, LeaseTable
from kvtransfer.saturation import SaturationLog
from kvtransfer.scatter import format_of
from kvtransfer.wire import Frame, FrameError, FrameLimits, decode

if TYPE_CHECKING:
    from engine.kernels.choices import Choices

PayloadT = TypeVar("PayloadT")

# That one answer asks for: 4 GiB of frames of 1 MiB, and far below what a message may have.
MAX_RESEND_FRAMES = 4096


class KvReceiver(Generic[PayloadT]):
    """The receiving end of one decode worker.

    on_committed: called inside the commit, before it is answered; from then on
        the blocks belong to the payload's owner.
    on_lost: called when the receiver itself gave a lease up (CORRUPT); its blocks
        are back in the pool already.
    clock: seconds, to tell how long verifying and storing take.
    max_resends: how often one write may be asked to send missing frames again.
    has_digests: whether frames are verified; only off where the senders are told so too.
    choices: of the engine's kernels; None where it computes without them.
    """

    def __init__(
        self,
        leases: LeaseTable[PayloadT],
        cache: KVCache,
        incarnation: int,
        *,
        on_committed: Callable[[Lease[PayloadT], FirstToken], None],
        on_lost: Callable[[Lease[PayloadT], GoneReason], None],
        clock: Callable[[], float],
        max_resends: int = 3,
        has_digests: bool = True,
        choices: Choices | None = None,
    ) -> None:
        self.leases = leases
        self.cache = cache
        self.on_committed = on_committed
        self.on_lost = on_lost
        self.clock = clock
        self.max_resends = max_resends
        self.has_digests = has_digests
        self.counters: Counter[str] = Counter()
        self.format = format_of(cache.shape)
        self.block_writer = writer_of(cache, choices)
        self.saturation = SaturationLog()
        self._incarnation = incarnation
        self._writes: dict[bytes, IncomingWrite[PayloadT]] = {}

    @property
    def num_open_writes(self) -> int:
        """Writes that are neither answered nor closed."""
        return len(self._writes)

    def warm_up(self) -> None:
        """Lets no frame wait for a kernel's compiler. May take seconds; before anything is in the cache."""
        self.block_writer.warm_up()

    def open(
        self, ticket: Ticket, now: float, on_ended: Callable[[Gone], None]
    ) -> IncomingWrite[PayloadT] | Outcome:
        """Admits a write, or answers it at once.

        on_ended: called synchronously, at most once, when the write's lease ends
            or a newer stream fences it; the stream must then send that answer.
        Raises IncompatiblePeer, naming the field, if the sender's model has another shape.
        """
        self.check_format(ticket.format)
        if ticket.incarnation != self._incarnation:
            return self.leases.refuse(Gone(GoneReason.FENCED))
        lease = self.leases.accept(ticket.lease_id, ticket.attempt_id, now)
        if isinstance(lease, Gone):
            return lease
        if lease.state is LeaseState.COMMITTED:
            return Committed()
        older = self._writes.pop(lease.attempt_id, None)
        if older is not None:
            older.fence(Gone(GoneReason.FENCED))
        write = IncomingWrite(self, lease, ticket.format, on_ended)
        self._writes[lease.attempt_id] = write
        return write

    def check_format(self, fmt: KvFormat) -> None:
        """Raises IncompatiblePeer, naming the field, unless KV of that format can be converted to ours."""
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            theirs, ours = getattr(fmt, name), getattr(self.format, name)
            if theirs != ours:
                raise IncompatiblePeer(
                    f"{name} is {theirs} at the sender and {ours} here; serve the same model from both",
                    field=name,
                )

    def discard(self, write: IncomingWrite[PayloadT]) -> None:
        """Forgets a write that has ended; idempotent."""
        if self._writes.get(write.lease.attempt_id) is write:
            del self._writes[write.lease.attempt_id]


class IncomingWrite(Generic[PayloadT]):
    """One stream writing into one lease. Created by KvReceiver.open()."""

    def __init__(
        self,
        receiver: KvReceiver[PayloadT],
        lease: Lease[PayloadT],
        fmt: KvFormat,
        on_ended: Callable[[Gone], None],
    ) -> None:
        self.lease = lease
        self._receiver = receiver
        self._format = fmt
        self._on_ended = on_ended
        self._limits = FrameLimits(num_tokens=lease.num_tokens, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self._first_block = lease.num_held_tokens // fmt.block_size
        num_blocks = blocks_needed(lease.num_tokens, fmt.block_size) - self._first_block
        self._covered_NL = np.zeros((num_blocks, fmt.num_layers), dtype=bool)
        if lease.num_held_tokens == lease.num_tokens:
            self._covered_NL[:] = True
        self._indices: set[int] = set()
        self._num_resends = 0
        self._verify_s = 0.0
        self._convert_s = 0.0
        self._ended: Outcome | None = None
        lease.on_ended = self.fence

    def fence(self, gone: Gone) -> None:
        """Ends the write from the receiver's side: every later call answers `gone`."""
        if self._ended is None:
            self._ended = gone
            self._receiver.discard(self)
            self._on_ended(gone)

    def frame(self, header: bytes | memoryview, payload: memoryview, now: float) -> Gone | None:
        """Verifies and scatters one frame; Gone if the lease has ended. Duplicates are harmless.

        payload: borrowed for this call.
        """
        gone = self._refused(now)
        if gone is not None:
            return gone
        receiver = self._receiver
        began = receiver.clock()
        try:
            frame = decode(header, payload, self._format, self._limits, has_digest=receiver.has_digests)
        except FrameError as error:
            receiver.counters[f"bad_frame_{error.reason}"] += 1
            return None
        finally:
            verified = receiver.clock()
            self._verify_s += verified - began
        if frame.spec.index >= self._covered_NL.size:
            # More frames than there are cells: no plan numbers one so.
            receiver.counters["bad_frame_index"] += 1
            return None
        if frame.spec.index in self._indices:
            receiver.counters["duplicate_frames"] += 1
            return None
        self._store(frame, now)
        self._convert_s += receiver.clock() - verified
        return None

    def _refused(self, now: float) -> Gone | None:
        if isinstance(self._ended, Gone):
            return self._receiver.leases.refuse(self._ended)
        return self._receiver.leases.check(self.lease, now)

    def _store(self, frame: Frame, now: float) -> None:
        spec, lease, receiver = frame.spec, self.lease, self._receiver
        num_saturated = receiver.block_writer.write(
            self._format, lease.block_ids, frame, num_held_tokens=lease.num_held_tokens
        )
        receiver.counters["saturated_values"] += num_saturated
        receiver.saturation.add(num_saturated, now)
        receiver.counters["frames"] += 1
        receiver.counters["bytes"] += frame.payload.nbytes
        first = max(0, spec.first_block - self._first_block)
        end = max(0, spec.first_block + spec.num_blocks - self._first_block)
        self._covered_NL[first:end, spec.first_layer : spec.first_layer + spec.num_layers] = True
        self._indices.add(spec.index)

    def commit(self, num_frames: int, first_token: FirstToken, now: float) -> Answer:
        """Committed if every frame and every token of every layer is here; else Resend, or Gone."""
        gone = self._refused(now)
        if gone is not None:
            return gone
        # A frame carries at least one block of one layer, so a larger number is a lie; it
        # must not size anything here.
        if num_frames > self._covered_NL.size:
            return self._give_up(now)
        missing = tuple(index for index in range(num_frames) if index not in self._indices)[
            :MAX_RESEND_FRAMES
        ]
        if missing and self._num_resends < self._receiver.max_resends:
            self._num_resends += 1
            self._receiver.counters["resent_frames"] += len(missing)
            return Resend(missing)
        if missing or not self._covered_NL.all():
            return self._give_up(now)
        return self._commit(first_token, now)

    def _commit(self, first_token: FirstToken, now: float) -> Outcome:
        outcome = self._receiver.leases.commit(self.lease, now)
        if isinstance(outcome, Committed):
            self._ended = outcome
            self._receiver.discard(self)
            self._receiver.on_committed(self.lease, first_token)
            return Committed(verify_s=self._verify_s, convert_s=self._convert_s)
        return outcome

    def _give_up(self, now: float) -> Gone:
        # The stream gets its answer as the result of commit(), not through on_ended.
        gone = Gone(GoneReason.CORRUPT)
        self._ended = gone
        self.lease.on_ended = None
        self._receiver.discard(self)
        self._receiver.leases.release(self.lease.attempt_id, gone.reason, now)
        self._receiver.on_lost(self.lease, gone.reason)
        return gone

    def close(self) -> None:
        """The stream has ended. Before its commit: the lease waits for another one. Idempotent."""
        if self._ended is None:
            self._ended = Gone(GoneReason.SENDER_LOST)
            self.lease.on_ended = None
            self._receiver.discard(self)
            self._receiver.leases.rewind(self.lease)
