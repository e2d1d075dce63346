"""The decode worker's shell: reservations, committed KV, steps, and their tokens.

Owns the attempts, the leases and the blocks; all on one event loop, which is
the only arbiter of every lease. An attempt ends in exactly one place, _end().
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING

from baton.drain import Drain
from baton.errors import BatonError, DeadlineExceeded, Draining, InternalError, PeerLost, Unavailable
from baton.failure import to_failure
from baton.health import WorkerHealth, WorkerLoad
from baton.identity import Identity
from baton.limits import Limits
from baton.logs import get_logger
from baton.sessions import converse, first_message, send_unless_ended
from baton.telemetry import start_span
from baton.v1 import common_pb2, decode_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from decode_worker import reports
from decode_worker.attempt import Attempt, RouterSession
from decode_worker.lease_clock import LeaseClock
from decode_worker.reservation import reserve_blocks
from engine.engine import Engine
from engine.events import ChunkComputed, Event, Preempted, RequestFailed, TokenSampled
from engine.request import RequestStatus
from engine.step_loop import StepLoop
from engine.step_meter import StepLoad
from kvtransfer.cache_feed import CacheFeed
from kvtransfer.contract import Committed, FirstToken, Gone, GoneReason
from kvtransfer.lease_table import Lease, LeaseTable, Refusal
from kvtransfer.receiver import KvReceiver
from kvtransfer.sequence import read_sequence
from kvtransfer.token_events import write_first_token, write_token
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.service import KvService

if TYPE_CHECKING:
    from engine.kernels.choices import Choices

log = get_logger(__name__)


class DecodeWorker:
    """Serves any number of router sessions with one engine.

    transfer_address: host:port of the server to which `transfers` is added.
    rng: source of lease ids.
    arena: slots that KV can be written into, without a stream to carry it.
    has_digests: whether KV frames are verified; only off where the prefill workers are told so too.
    choices: of the engine's kernels; None where it computes without them.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        engine: Engine,
        limits: Limits,
        pid: int,
        lease_ttl_s: float,
        rng: random.Random,
        arena: Arena | None = None,
        has_digests: bool = True,
        choices: Choices | None = None,
    ) -> None:
        self.transfer_address = ""
        self._identity = identity
        self._engine = engine
        self._limits = limits
        self._pid = pid
        self._leases: LeaseTable[Attempt] = LeaseTable(engine.pool, rng=rng, ttl_s=lease_ttl_s)
        self.receiver = KvReceiver(
            self._leases,
            engine.cache,
            identity.incarnation,
            clock=lambda: asyncio.get_running_loop().time(),
            has_digests=has_digests,
            choices=choices,
            on_committed=self._committed,
            on_lost=self._lost,
        )
        self.transfers = KvService(self.receiver, identity, arena)
        self._attempts: dict[bytes, Attempt] = {}
        self._cache_feed: CacheFeed[RouterSession] = CacheFeed(engine.pool, self._tell_cache)
        self._steps = StepLoop(engine.scheduler, engine.runner, self._on_step, self._announce_alone)
        self._clock = LeaseClock(self._leases, partial(self._lost, reason=GoneReason.EXPIRED))
        self._sessions: dict[RouterSession, None] = {}
        self._drain = Drain(
            announce=self._announce_drain,
            is_idle=lambda: not self._attempts,
            hand_over=self._hand_over,
            has_left=lambda: not self._sessions and engine.scheduler.fence is None,
        )

    def reachable_at(self, address: str) -> None:
        """Says where prefill workers reach `transfers`: host:port."""
        self.transfer_address = address

    async def run(self) -> None:
        """Runs steps until cancelled; a failing step ends the worker."""
        await self._steps.run()

    def ledger(self) -> dict[str, int]:
        """Everything held for requests."""
        pool, scheduler = self._engine.pool, self._engine.scheduler
        return {
            "attempts": len(self._attempts),
            "blocks_used": pool.num_used,
            "blocks_fenced": pool.num_fenced,
            "leases": self._leases.num_leases,
            "writes": self.receiver.num_open_writes,
            "slots_held": self.transfers.num_held_slots,
            "requests_running": scheduler.num_running,
            "requests_waiting": scheduler.num_waiting,
            "grammars": scheduler.num_grammars,
        }

    def totals(self) -> dict[str, int]:
        """Counts since the start, which only grow."""
        return {
            **self.receiver.counters,
            **self.transfers.counters,
            "expired_leases": self._leases.num_expired,
            "refused_writes": self._leases.num_refused_writes,
        }

    def load(self) -> WorkerLoad:
        """How busy the worker is."""
        return self._engine.load(num_attempts=len(self._attempts))

    def health(self) -> WorkerHealth:
        """Whether it takes requests, and makes progress."""
        steps = self._steps
        return WorkerHealth.of(steps.complaint, self._drain.complaint, is_alive=steps.is_alive)

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, decodes what it has for grace_s seconds, and hands over the rest.

        Steps must go on meanwhile, and the server must not stop: what was reserved before is still to come.
        """
        await self._drain.run(grace_s)

    async def serve(self, session: RouterSession) -> None:
        """Holds one router's session until it ends.

        Raises PeerLost, IncompatiblePeer, Draining, or Unavailable while the device makes no progress.
        """
        incoming = aiter(session)
        opening = await first_message(incoming, session.peer)
        self._identity.check(opening.hello)
        # A router that comes back has no attempt here any more: those ended with its last session.
        self._drain.check()
        if self._steps.is_wedged:
            raise Unavailable("the device makes no progress; this worker takes no sessions until it does")
        session.send(DecodeServiceSessionResponse(hello=self._identity.hello()))
        session.send(reports.capacity(self._engine, transfer_address=self.transfer_address, pid=self._pid))
        self._cache_feed.join(session)
        self._sessions[session] = None
        log.info("router joined", router=opening.hello.name)
        try:
            await converse(session, incoming, partial(self._receive, session), self._heartbeat)
        finally:
            self._cache_feed.leave(session)
            for attempt in [a for a in self._attempts.values() if a.session is session]:
                self._end(attempt)
            self._sessions.pop(session, None)
            self._drain.changed()
            log.info("router left", router=opening.hello.name)

    def _receive(self, session: RouterSession, message: DecodeServiceSessionRequest) -> None:
        now = asyncio.get_running_loop().time()
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(session, message.reserve, now)
            case "release":
                self._release(message.release.attempt_id, now)
            case "abort_if_uncommitted":
                self._abort_if_uncommitted(session, message.abort_if_uncommitted.attempt_id, now)
            case "heartbeat":
                self._leases.renew(message.heartbeat.attempt_ids, now)
            case other:
                raise PeerLost(f"the router sent {other or 'an unknown message'} in mid-session")

    def _reserve(
        self, session: RouterSession, command: decode_service_pb2.ReserveCommand, now: float
    ) -> None:
        result = decode_service_pb2.ReserveResult(attempt_id=command.attempt_id)
        granted = self._grant(session, command, now)
        if isinstance(granted, BatonError):
            result.refusal.failure.CopyFrom(to_failure(granted))
        else:
            result.lease.lease_id = granted.lease_id
            result.lease.ttl_ms = round(1000 * self._leases.ttl_s)
            result.lease.num_held_tokens = granted.num_held_tokens
        result.num_free_blocks = reports.num_reservable_blocks(self._engine)
        session.send(DecodeServiceSessionResponse(reserve_result=result))
        if command.compute_locally and not isinstance(granted, BatonError):
            self._compute_locally(granted, now)

    def _grant(
        self, session: RouterSession, command: decode_service_pb2.ReserveCommand, now: float
    ) -> Lease[Attempt] | BatonError:
        """A lease for the tokens there are and one more, or why there is none."""
        sequence = command.sequence
        try:
            self._drain.check()
            request = read_sequence(command.attempt_id, sequence, self._limits, now=now)
        except BatonError as error:
            return error
        request.status = RequestStatus.TRANSFERRING
        attempt = Attempt(
            request=request,
            session=session,
            request_id=sequence.request_id,
            traceparent=sequence.traceparent,
            arrived_at=now,
            is_computing_prompt=command.compute_locally,
        )
        lease = reserve_blocks(attempt, self._engine, self._leases, self._limits, now)
        if isinstance(lease, Refusal):
            return lease.error
        self._attempts[request.attempt_id] = attempt
        self._clock.watch()
        if sequence.remaining_ms:
            attempt.deadline = asyncio.get_running_loop().call_later(
                sequence.remaining_ms / 1000, self._fail, attempt, DeadlineExceeded("the deadline passed")
            )
        if not command.compute_locally:
            self._engine.scheduler.prepare(request)
        return lease

    def _compute_locally(self, lease: Lease[Attempt], now: float) -> None:
        """Nothing will be transferred: the request joins, and computes what is not held."""
        self._leases.commit(lease, now)
        request = lease.payload.request
        self._take_blocks(lease)
        request.rewind()
        request.num_computed_tokens = request.num_cached_tokens = lease.num_held_tokens
        self._join(lease.payload)

    def _take_blocks(self, lease: Lease[Attempt]) -> None:
        """From the commit on the request owns the blocks; others have published the held ones."""
        request = lease.payload.request
        request.block_ids = list(lease.block_ids)
        request.num_published_blocks = lease.num_held_tokens // self._engine.pool.block_size

    def _join(self, attempt: Attempt, first_token: FirstToken | None = None) -> None:
        """The request joins the next step; first_token: sampled elsewhere, to be repeated to the router."""
        attempt.span = start_span(
            "DECODING", parent=attempt.traceparent, attributes={"baton.request_id": attempt.request_id}
        )
        send_unless_ended(attempt.session, reports.lease_outcome(attempt.attempt_id, Committed()))
        if first_token is not None:
            # The router may have lost the prefill worker's own message; it drops what it knows already.
            repeated = write_first_token(attempt.attempt_id, first_token)
            self._send_tokens({attempt.session: [repeated]}, load=None)
        try:
            self._engine.scheduler.add(attempt.request)
        except BatonError as error:
            # The router knows of the commit; it hears now that nothing will come of it.
            self._fail(attempt, error)
            return
        self._steps.wake()

    def _committed(self, lease: Lease[Attempt], first_token: FirstToken) -> None:
        """The KV is here: from now on the request owns the blocks, and it joins the next step."""
        attempt, request = lease.payload, lease.payload.request
        self._take_blocks(lease)
        if first_token.token_id >= self._limits.vocab_size:
            self._fail(attempt, InternalError("the prefill worker sent a token outside the vocabulary"))
            return
        request.num_computed_tokens = request.num_tokens
        request.token_ids.append(first_token.token_id)
        request.move_to(RequestStatus.DECODING)
        self._join(attempt, first_token)

    def _lost(self, lease: Lease[Attempt], reason: GoneReason) -> None:
        """A lease ended without its router's doing: the router hears of it, and the attempt ends."""
        send_unless_ended(lease.payload.session, reports.lease_outcome(lease.attempt_id, Gone(reason)))
        self._end(lease.payload, reason)

    def _announce_alone(self, attempt_id: bytes, ended: bool) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            send_unless_ended(attempt.session, reports.alone_step(attempt_id, ended=ended))

    def _on_step(self, events: list[Event]) -> None:
        by_session: dict[RouterSession, list[common_pb2.TokenEvent]] = {}
        for event in events:
            attempt = self._attempts[event.request.attempt_id]
            if isinstance(event, RequestFailed):
                self._fail(attempt, event.error)
            elif isinstance(event, Preempted):
                self._gave_way(attempt, outgrown=event.outgrown)
            elif isinstance(event, ChunkComputed):
                self._tell_scores(attempt, event)
                # Its router learns what such steps cost, though no token came of it.
                by_session.setdefault(attempt.session, [])
            elif isinstance(event, TokenSampled):
                self._tell_scores(attempt, event)
                self._tell_prompt(attempt)
                by_session.setdefault(attempt.session, []).append(write_token(event))
                if event.request.is_finished:
                    self._end(attempt)
        self._send_tokens(by_session, load=self._steps.load)
        self._drain.changed()

    def _tell_scores(self, attempt: Attempt, event: ChunkComputed | TokenSampled) -> None:
        if event.prompt_logprobs is not None:
            send_unless_ended(attempt.session, reports.prompt_scores(attempt, event.prompt_logprobs))

    def _tell_prompt(self, attempt: Attempt) -> None:
        if attempt.is_computing_prompt:
            attempt.is_computing_prompt = False
            now = asyncio.get_running_loop().time()
            send_unless_ended(attempt.session, reports.prompt_computed(attempt, now))

    def _send_tokens(
        self, by_session: dict[RouterSession, list[common_pb2.TokenEvent]], *, load: StepLoad | None
    ) -> None:
        """One message per router carries the tokens of all its requests."""
        num_free_blocks = reports.num_reservable_blocks(self._engine)
        for session, tokens in by_session.items():
            send_unless_ended(
                session, reports.step_events(tokens, num_free_blocks=num_free_blocks, load=load)
            )

    def _tell_cache(self, session: RouterSession, changes: common_pb2.CacheChanges) -> None:
        send_unless_ended(session, DecodeServiceSessionResponse(cache_changes=changes))

    def _release(self, attempt_id: bytes, now: float) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            self._end(attempt)
        else:
            # Its Reserve may still be on the way; the tombstone refuses it.
            self._leases.release(attempt_id, GoneReason.CANCELLED, now)

    def _abort_if_uncommitted(self, session: RouterSession, attempt_id: bytes, now: float) -> None:
        outcome = self._leases.abort_if_uncommitted(attempt_id, now)
        if not isinstance(outcome, Committed) and attempt_id in self._attempts:
            self._end(self._attempts[attempt_id])
        send_unless_ended(session, reports.lease_outcome(attempt_id, outcome))

    def _fail(self, attempt: Attempt, error: BatonError) -> None:
        attempt.note_failure(error)
        send_unless_ended(attempt.session, reports.failed(attempt.attempt_id, error))
        self._end(attempt)

    def _gave_way(self, attempt: Attempt, *, outgrown: bool) -> None:
        """Its router resumes it; this worker does while it is leaving, as it may be the last one there is."""
        request = attempt.request
        if self._drain.is_draining:
            request.scale_to(self._limits.rope_step(request.num_tokens))
            self._engine.scheduler.add(request)
            self._steps.wake()
            return
        send_unless_ended(attempt.session, reports.preempted(attempt.attempt_id, outgrown=outgrown))
        self._end(attempt)

    def _end(self, attempt: Attempt, reason: GoneReason = GoneReason.CANCELLED) -> None:
        """The one end of an attempt, finished or not; idempotent."""
        if self._attempts.pop(attempt.attempt_id, None) is None:
            return
        scheduler, pool = self._engine.scheduler, self._engine.pool
        scheduler.remove(attempt.attempt_id)
        if attempt.request.block_ids:
            pool.release(attempt.request.block_ids, scheduler.fence)
        self._leases.release(attempt.attempt_id, reason, asyncio.get_running_loop().time())
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        if attempt.span is not None:
            attempt.span.set(**{"baton.num_output_tokens": attempt.request.num_output_tokens})
            attempt.span.end()
        self._steps.wake()
        self._drain.changed()

    def _announce_drain(self) -> None:
        for session in self._sessions:
            send_unless_ended(session, self._heartbeat())

    def _hand_over(self, error: Draining) -> None:
        for attempt in list(self._attempts.values()):
            self._fail(attempt, error)

    def _heartbeat(self) -> DecodeServiceSessionResponse:
        return reports.heartbeat(
            self._engine,
            num_leases=self._leases.num_uncommitted,
            num_saturated_values=self.receiver.counters["saturated_values"],
            is_wedged=self._steps.is_wedged,
            is_draining=self._drain.is_draining,
        )
