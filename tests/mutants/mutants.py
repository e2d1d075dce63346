"""Bugs of the workers, of the transfer between them, and of a request's drive."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from baton.errors import BatonError
from baton.v1 import decode_service_pb2
from decode_worker.worker import DecodeWorker
from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.scheduler import Scheduler
from kvtransfer import wire
from kvtransfer.contract import Answer, Committed, Gone, GoneReason, Ticket
from kvtransfer.lease_table import LeaseTable
from kvtransfer.receiver import IncomingWrite, KvReceiver
from kvtransfer.slots import SlotTable
from kvtransfer.transports.writer import GrpcKvWriter
from prefill_worker.credits import CreditTable
from prefill_worker.pairs import Pairs
from prefill_worker.worker import PrefillWorker
from router.attempt import Attempt
from router.generation import Generation
from router.link import WorkerLink
from router.prefill_link import PrefillLink
from tests.mutants.mutant import Mutant, registering

MUTANTS: list[Mutant] = []
mutant = registering(MUTANTS)


@mutant("blocks of a cancelled request are given away while a step still writes to them", seed=2)
def step_fence_skipped() -> Any:
    return patch.object(Scheduler, "fence", property(lambda self: None))


@mutant("a sender that was cut off writes into blocks that belong to somebody else by now", seed=1)
@contextmanager
def lease_fence_skipped() -> Iterator[None]:
    def nothing(self: Any, gone: Gone) -> None:
        """The lease has ended; the stream does not hear of it."""

    with (
        patch.object(IncomingWrite, "fence", nothing),
        patch.object(IncomingWrite, "_refused", lambda self, now: None),
        patch.object(LeaseTable, "check", lambda self, lease, now: None),
    ):
        yield


@mutant("the KV of another prompt is sent: blocks are reused before the receiver has them")
def freed_before_acknowledgement() -> Any:
    sampled = PrefillWorker._token_sampled

    def free_at_once(self: Any, attempt: Any, event: Any) -> None:
        sampled(self, attempt, event)
        if attempt.request.block_ids and not attempt.request.is_finished:
            self._free(attempt.request.block_ids)
            attempt.request.block_ids = []

    return patch.object(PrefillWorker, "_token_sampled", free_at_once)


@mutant("a cancelled request keeps its blocks until its lease expires")
def no_release_on_cancel() -> Any:
    def forget(self: Any, attempt_id: bytes) -> None:
        self._inboxes.pop(attempt_id, None)

    return patch.object(WorkerLink, "detach", forget)


@mutant("the first token is missing if the prefill worker's message is lost", seed=1)
def first_token_gap() -> Any:
    committed = DecodeWorker._committed

    def silently(self: Any, lease: Any, first_token: Any) -> None:
        with patch.object(DecodeWorker, "_send_tokens", lambda self, by_session: None):
            committed(self, lease, first_token)

    return patch.object(DecodeWorker, "_committed", silently)


@mutant(
    "a request that has finished is computed again: what became of its attempt is forgotten at once", seed=68
)
@contextmanager
def tombstone_missing() -> Iterator[None]:
    def abort(self: Any, attempt_id: bytes, now: float) -> Any:
        lease = self._leases.get(attempt_id)
        if lease is not None and not lease.is_uncommitted:
            return Committed()
        self.release(attempt_id, GoneReason.CANCELLED, now)
        return Gone(GoneReason.CANCELLED)

    with (
        patch.object(LeaseTable, "_bury", lambda self, attempt_id, outcome, now: None),
        patch.object(LeaseTable, "abort_if_uncommitted", abort),
    ):
        yield


@mutant("a write that was meant for a worker's former life is taken by the next one", seed=30)
def incarnation_not_checked() -> Any:
    admit = KvReceiver.open

    def anyway(self: Any, ticket: Ticket, *args: Any) -> Any:
        return admit(self, dataclasses.replace(ticket, incarnation=self._incarnation), *args)

    return patch.object(KvReceiver, "open", anyway)


@mutant("a lease lives for ever: KV is accepted long after its router gave up renewing", seed=23)
@contextmanager
def lease_never_expires() -> Iterator[None]:
    reserve = LeaseTable.reserve

    def for_ever(self: Any, *args: Any, **options: Any) -> Any:
        self.ttl_s = 1e9
        return reserve(self, *args, **options)

    with patch.object(LeaseTable, "reserve", for_ever):
        yield


@mutant("a prefill worker keeps a lease alive that no router wants any more", seed=156)
def lease_renewed_by_the_sender() -> Any:
    frame = IncomingWrite.frame

    def renewing(self: Any, header: Any, payload: Any, now: float) -> Any:
        self._receiver.leases.renew([self.lease.attempt_id], now)
        return frame(self, header, payload, now)

    return patch.object(IncomingWrite, "frame", renewing)


@mutant("a prefill worker takes fewer and fewer prompts, and then none")
def credit_leaked() -> Any:
    return patch.object(CreditTable, "restore", lambda self, session_id, cost: [])


@mutant("a prefill worker takes more prompts than it has room for")
def credit_granted_twice() -> Any:
    restore = CreditTable.restore

    def twice(self: Any, session_id: int, cost: int) -> Any:
        return restore(self, session_id, cost) + restore(self, session_id, cost)

    return patch.object(CreditTable, "restore", twice)


@mutant("credit of a prompt that was refused a reservation is lost", seed=1)
def credit_not_given_back() -> Any:
    give_back = PrefillLink.give_back

    def lose(self: Any, attempt_id: bytes) -> None:
        self._costs[attempt_id] = 0
        give_back(self, attempt_id)

    return patch.object(PrefillLink, "give_back", lose)


@mutant("the client sees the first token twice")
def no_dedupe_by_index() -> Any:
    deliver = Generation.deliver

    def all_of_it(self: Any, event: Any) -> None:
        event.start_index = len(self.token_ids)
        deliver(self, event)

    return patch.object(Generation, "deliver", all_of_it)


@mutant("a bit that flipped on the way becomes a wrong answer", seed=23)
def frame_digest_not_verified() -> Any:
    return patch.object(wire, "_digest", lambda fields, payload: 0)


@mutant("a resumed request computes its answer again from the start")
def resume_forgets_tokens() -> Any:
    sequence = Generation.sequence

    def from_the_start(self: Any) -> Any:
        token_ids, self.token_ids = self.token_ids, []
        try:
            return sequence(self)
        finally:
            self.token_ids = token_ids

    return patch.object(Generation, "sequence", from_the_start)


@mutant("a resumed request loses the last token that its client has")
def resume_one_token_short() -> Any:
    sequence = Generation.sequence

    def short(self: Any) -> Any:
        message = sequence(self)
        if len(message.token_ids) > message.num_prompt_tokens:
            message.token_ids.pop()
        return message

    return patch.object(Generation, "sequence", short)


@mutant("a request waits for an answer that never comes", seed=4)
def abort_if_uncommitted_ignored() -> Any:
    return patch.object(DecodeWorker, "_abort_if_uncommitted", lambda self, session, attempt_id, now: None)


@mutant("a committed request is given up, and its blocks with it, when its prefill worker dies", seed=68)
def abort_does_not_look_at_the_commit() -> Any:
    def abort(self: Any, attempt_id: bytes, now: float) -> Any:
        self.release(attempt_id, GoneReason.CANCELLED, now)
        return Gone(GoneReason.CANCELLED)

    return patch.object(LeaseTable, "abort_if_uncommitted", abort)


@mutant("an attempt that ends twice gives its blocks back twice: those of somebody else by then", seed=1)
@contextmanager
def release_not_idempotent() -> Iterator[None]:
    end, release = PrefillWorker._end, BlockPool.release

    def again(self: Any, attempt: Any, error: Any) -> None:
        if attempt.attempt_id in self._attempts:
            block_ids = list(attempt.request.block_ids)
            asyncio.get_running_loop().call_later(0.3, self._engine.pool.release, block_ids)
        end(self, attempt, error)

    def unchecked(self: Any, block_ids: Any, fence: int | None = None) -> None:
        # The pool's own check would stop the worker before any harm is done.
        for block_id in block_ids:
            with suppress(ValueError):
                release(self, [block_id], fence)

    with patch.object(PrefillWorker, "_end", again), patch.object(BlockPool, "release", unchecked):
        yield


@mutant("a request decodes with holes in its KV", seed=23)
def commit_without_coverage() -> Any:
    commit = IncomingWrite.commit

    def blindly(self: Any, num_frames: int, first_token: Any, now: float) -> Answer:
        self._indices = set(range(num_frames))
        self._covered_NL[:] = True
        return commit(self, num_frames, first_token, now)

    return patch.object(IncomingWrite, "commit", blindly)


@mutant("a step's result is applied to requests that have left")
def result_of_a_request_that_left() -> Any:
    remove = Scheduler.remove

    def keep(self: Any, attempt_id: bytes) -> Any:
        return None if self.fence is not None else remove(self, attempt_id)

    return patch.object(Scheduler, "remove", keep)


@mutant(
    "a request is given the KV of another prompt: its block was reused, and is still found by its old key"
)
def eviction_forgets_the_index() -> Any:
    return patch.object(BlockPool, "_evict", lambda self: self._cached.popitem(last=False)[0])


@mutant("a request shares KV that is not computed yet", seed=6)
@contextmanager
def published_before_it_is_computed() -> Iterator[None]:
    cover = BlockTables.cover

    def too_early(self: Any, request: Any) -> bool:
        is_covered = cover(self, request)
        computed, request.num_computed_tokens = request.num_computed_tokens, request.num_tokens
        self.publish(request)
        request.num_computed_tokens = computed
        return is_covered

    with patch.object(BlockTables, "cover", too_early):
        yield


@mutant("a request that gives way takes its blocks along, and the worker runs dry")
def blocks_of_the_preempted_lost() -> Any:
    def lose(self: Any, request: Any, fence: Any = None) -> None:
        request.block_ids = []

    return patch.object(BlockTables, "give_back", lose)


@mutant("a request that gave way starts over, and its client sees the answer twice")
def preemption_forgets_tokens() -> Any:
    decode_said = Attempt._decode_said

    def forgetful(self: Any, event: Any) -> None:
        if isinstance(event, decode_service_pb2.Preempted):
            self._owner.token_ids = []
        decode_said(self, event)

    return patch.object(Attempt, "_decode_said", forgetful)


@mutant("a request is given KV that is not computed yet: its layers are told too early", seed=1)
def layers_told_too_early() -> Any:
    on_layers = PrefillWorker._on_layers

    def early(self: Any, num_layers: int, stored: Any) -> None:
        on_layers(self, min(num_layers + 1, self._engine.cache.shape.num_layers), stored)

    return patch.object(PrefillWorker, "_on_layers", early)


@mutant(
    "KV is overwritten while it is read: its slots were given away under a sender that was cut off", seed=29
)
def slots_not_quarantined() -> Any:
    end = SlotTable.end

    def at_once(self: Any, write: Any, now: float, *, is_quiet: bool) -> None:
        end(self, write, now, is_quiet=True)

    return patch.object(SlotTable, "end", at_once)


@mutant("KV is overwritten while it is read: a sender that lives was taken for dead", seed=29)
def sender_taken_for_dead() -> Any:
    def met(self: Any, sender: Any) -> None:
        for quarantine in self._quarantined:
            self._free.extend(quarantine.slots)
        self._quarantined.clear()

    return patch.object(SlotTable, "met", met)


@mutant("KV is overwritten while it is read: a sender says that it is quiet, and still writes")
def quiet_said_too_early() -> Any:
    async def leave_it(self: Any, work: Any) -> Any:
        return await asyncio.shield(asyncio.ensure_future(work))

    return patch.object(GrpcKvWriter, "wholly", leave_it)


@mutant("slots whose write has ended are lost, and KV goes a slow way for ever")
def slots_leaked() -> Any:
    return patch.object(SlotTable, "end", lambda self, write, now, *, is_quiet: None)


@mutant("a decode worker that could not be reached once gets no prompts any more", seed=31)
def pair_tried_once() -> Any:
    async def reach(self: Any, peer: Any) -> None:
        try:
            self._set(peer.incarnation, await self._transport.pair(peer))
        except BatonError as error:
            self._set(peer.incarnation, error)

    return patch.object(Pairs, "_reach", reach)


@mutant("connections to decode workers that are long dead are kept", seed=2)
def pair_never_parted() -> Any:
    return patch.object(Pairs, "part", lambda self, session_id, incarnation: None)
