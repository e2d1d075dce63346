"""The prefill worker's shell: commands in, one token and one transfer out per prompt.

Owns the attempts and, through them, every block in use. All of it lives on one
event loop; the engine thread only executes steps. An attempt ends in exactly
one place, _end(), whatever the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from functools import partial
from typing import TYPE_CHECKING

from baton.drain import Drain
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    KvTransferFailed,
    PeerLost,
    Unavailable,
)
from baton.failure import to_failure
from baton.health import WorkerHealth, WorkerLoad
from baton.identity import Identity
from baton.limits import Limits
from baton.logs import get_logger
from baton.sessions import converse, first_message, send_unless_ended
from baton.telemetry import start_span
from baton.v1 import common_pb2, prefill_service_pb2
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest, PrefillServiceSessionResponse
from engine.engine import Engine
from engine.events import ChunkComputed, Event, RequestFailed, TokenSampled
from engine.step_loop import StepLoop
from kvtransfer.cache_feed import CacheFeed
from kvtransfer.contract import FirstToken, Gone, Outcome, Peer
from kvtransfer.metrics import SendMetrics
from kvtransfer.sender import KvSender, KvSource
from kvtransfer.sequence import read_sequence
from kvtransfer.token_events import write_prompt_logprobs, write_token
from prefill_worker.attempt import Attempt, RouterSession
from prefill_worker.credits import CreditChange, CreditTable
from prefill_worker.pairs import Pairs, PairState
from prefill_worker.reports import alone_step, capacity, credit, ended, heartbeat, pair_status

if TYPE_CHECKING:
    from engine.stored import Stored

log = get_logger(__name__)


class PrefillWorker:
    """Serves any number of router sessions with one engine.

    sender: moves KV out of the engine's cache.
    credit_tokens: budget of prompt tokens in flight, over all sessions.
    rng: spreads the pauses between tries to reach a decode worker.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        engine: Engine,
        limits: Limits,
        sender: KvSender,
        credit_tokens: int,
        pid: int,
        rng: random.Random,
        metrics: SendMetrics | None = None,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._limits = limits
        self._sender = sender
        self._credits = CreditTable(credit_tokens)
        self._pid = pid
        self._attempts: dict[bytes, Attempt] = {}
        self._sessions: dict[int, RouterSession] = {}
        self._session_ids = itertools.count()
        self._cache_feed: CacheFeed[RouterSession] = CacheFeed(engine.pool, self._tell_cache)
        self._metrics = metrics or SendMetrics()
        self._pairs = Pairs(sender.transport, rng, self._tell_pair, self._metrics)
        self._steps = StepLoop(
            engine.scheduler, engine.runner, self._on_step, self._announce_alone, self._on_layers
        )
        # Those of attempts that have ended as well, until they are done.
        self._transfers: set[asyncio.Task[None]] = set()
        self._drain = Drain(
            announce=self._announce_drain,
            is_idle=lambda: not self._attempts,
            hand_over=self._hand_over,
            has_left=lambda: not (self._sessions or self._transfers) and engine.scheduler.fence is None,
        )

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
            "requests_running": scheduler.num_running,
            "requests_waiting": scheduler.num_waiting,
            "grammars": scheduler.num_grammars,
            "transfers": self._sender.num_open_transfers,
            "credit_spent_tokens": self._credits.num_spent,
        }

    def totals(self) -> dict[str, int]:
        """Counts since the start, which only grow."""
        return self._sender.totals()

    def load(self) -> WorkerLoad:
        """How busy the worker is."""
        return self._engine.load(num_attempts=len(self._attempts))

    def health(self) -> WorkerHealth:
        """Whether it takes requests, and makes progress."""
        steps = self._steps
        return WorkerHealth.of(
            steps.complaint, self._drain.complaint, self._pairs.complaint, is_alive=steps.is_alive
        )

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, computes and commits what it has for grace_s seconds, and hands over the rest.

        Steps must go on meanwhile, and pairs must stand.
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
        session.send(PrefillServiceSessionResponse(hello=self._identity.hello()))
        session.send(capacity(self._engine, self._pid))
        self._cache_feed.join(session)
        session_id = next(self._session_ids)
        self._sessions[session_id] = session
        self._tell(self._credits.join(session_id))
        log.info("router joined", router=opening.hello.name)
        try:
            await converse(session, incoming, partial(self._receive, session, session_id), self._heartbeat)
        finally:
            del self._sessions[session_id]
            self._cache_feed.leave(session)
            for attempt in [a for a in self._attempts.values() if a.session_id == session_id]:
                self._end(attempt, Cancelled("the router's session ended"))
            self._tell(self._credits.leave(session_id))
            self._pairs.leave(session_id)
            self._drain.changed()
            log.info("router left", router=opening.hello.name)

    def _receive(
        self, session: RouterSession, session_id: int, message: PrefillServiceSessionRequest
    ) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                self._start(session, session_id, message.prefill)
            case "cancel":
                attempt = self._attempts.get(message.cancel.attempt_id)
                if attempt is not None:
                    self._end(attempt, Cancelled("the router cancelled the attempt"))
            case "credit_return":
                self._tell(self._credits.give_back(session_id, message.credit_return.tokens))
            case "heartbeat":
                self._tell(self._credits.ask_again(session_id))
            case "pair":
                peer = message.pair
                named = Peer(worker=peer.worker, incarnation=peer.incarnation, address=peer.address)
                self._pairs.meet(session_id, named)
            case "part":
                self._pairs.part(session_id, message.part.incarnation)
            case other:
                raise PeerLost(f"the router sent {other or 'an unknown message'} in mid-session")

    def _start(
        self, session: RouterSession, session_id: int, command: prefill_service_pb2.PrefillCommand
    ) -> None:
        self._credits.spend(session_id, command.cost_tokens)
        try:
            self._drain.check()
            if command.attempt_id in self._attempts:
                raise InternalError("the attempt is here already")
            request = read_sequence(
                command.attempt_id,
                command.sequence,
                self._limits,
                now=asyncio.get_running_loop().time(),
            )
            request.prefill_only = True
            self._engine.scheduler.add(request)
        except BatonError as error:
            self._tell(self._credits.restore(session_id, command.cost_tokens))
            ended = prefill_service_pb2.PrefillEnded(attempt_id=command.attempt_id, failure=to_failure(error))
            session.send(PrefillServiceSessionResponse(ended=ended))
            return
        attempt = self._attempts[request.attempt_id] = Attempt.of(command, request, session, session_id)
        if command.sequence.remaining_ms:
            late = DeadlineExceeded("the deadline passed while the prompt was computed")
            attempt.deadline = asyncio.get_running_loop().call_later(
                command.sequence.remaining_ms / 1000, self._end, attempt, late
            )
        self._steps.wake()

    def _announce_alone(self, attempt_id: bytes, ended: bool) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            send_unless_ended(attempt.session, alone_step(attempt_id, ended=ended))

    def _on_step(self, events: list[Event]) -> None:
        for event in events:
            attempt = self._attempts[event.request.attempt_id]
            match event:
                case ChunkComputed():
                    self._send_prompt_logprobs(attempt, event)
                    self._chunk_computed(attempt)
                case TokenSampled():
                    self._send_prompt_logprobs(attempt, event)
                    self._token_sampled(attempt, event)
                case RequestFailed():
                    self._end(attempt, event.error)
        self._drain.changed()

    def _send_prompt_logprobs(self, attempt: Attempt, event: ChunkComputed | TokenSampled) -> None:
        if event.prompt_logprobs is not None:
            message = write_prompt_logprobs(attempt.attempt_id, event.prompt_logprobs)
            send_unless_ended(attempt.session, PrefillServiceSessionResponse(prompt_logprobs=message))

    def _on_layers(self, num_layers: int, stored: Stored) -> None:
        """A step under way has that many layers of the prompts' last chunks in the cache."""
        for request in self._engine.scheduler.completing:
            attempt = self._attempts.get(request.attempt_id)
            if attempt is not None and self._has_begun(attempt):
                attempt.layers_stored(num_layers, stored)

    def _chunk_computed(self, attempt: Attempt) -> None:
        if self._has_begun(attempt) and attempt.transfer is not None:
            attempt.transfer.blocks_ready(attempt.request.num_computed_tokens)

    def _has_begun(self, attempt: Attempt) -> bool:
        """Begins the attempt's transfer unless it has none to make."""
        if attempt.ends_with_first_token:
            return False
        if attempt.task is None:
            source = KvSource(
                attempt_id=attempt.attempt_id,
                block_ids=tuple(attempt.request.block_ids),
                num_tokens=attempt.num_kv_tokens,
                traceparent=attempt.traceparent,
            )
            attempt.task = asyncio.create_task(
                self._transfer(attempt, source), name=f"transfer-{attempt.attempt_id.hex()[:8]}"
            )
            self._transfers.add(attempt.task)
            attempt.task.add_done_callback(self._transferred)
        return True

    def _token_sampled(self, attempt: Attempt, event: TokenSampled) -> None:
        """Sends the first token to the router at once; the transfer follows in its own time."""
        request = attempt.request
        attempt.sampled_at = asyncio.get_running_loop().time()
        attempt.span.end()
        self._restore_credit(attempt)
        send_unless_ended(attempt.session, PrefillServiceSessionResponse(token=write_token(event)))
        if request.is_finished:
            self._end(attempt, None)
            return
        self._chunk_computed(attempt)
        attempt.first_token.set_result(
            FirstToken(
                token_id=event.token_id,
                logprob=event.logprob if request.params.logprobs else None,
                start_index=request.num_output_tokens - 1,
                top=event.top,
            )
        )

    async def _transfer(self, attempt: Attempt, source: KvSource) -> None:
        transport = self._pairs.transport_to(attempt.target.incarnation)
        span = start_span(
            "TRANSFERRING",
            parent=attempt.traceparent,
            attributes={"baton.decode_worker": attempt.target.worker, "baton.transport": transport},
        )
        # Stands unless an outcome is known: whatever ends the transfer ends the attempt.
        error: BatonError | None = KvTransferFailed(
            f"the transfer to {attempt.target.worker} came to no outcome"
        )
        try:
            async with self._sender.transfer(source, attempt.target) as transfer:
                attempt.begin(transfer)
                result = attempt.result = await transfer.commit_with(attempt.first_token)
            if attempt.sampled_at is not None:
                attempt.tail_s = asyncio.get_running_loop().time() - attempt.sampled_at
            span.set(**{"baton.num_bytes": result.num_bytes})
            self._metrics.transferred(transport, result)
            error = _objection(result.outcome, attempt.target.worker)
        except BatonError as failed:
            error = failed
            self._metrics.failed(transport, failed)
            if isinstance(failed, PeerLost):
                self._pairs.doubt(attempt.target.incarnation, transport, failed)
        finally:
            if error is not None:
                span.fail(error)
            span.end()
            self._end(attempt, error)

    def _end(self, attempt: Attempt, error: BatonError | None) -> None:
        """The one end of an attempt: everything it holds goes back, and the router hears of it."""
        if self._attempts.pop(attempt.attempt_id, None) is None:
            return
        self._engine.scheduler.remove(attempt.attempt_id)
        self._restore_credit(attempt)
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        if error is not None:
            attempt.note_failure(error)
        attempt.span.end()
        send_unless_ended(attempt.session, ended(attempt, error))
        self._release_blocks(attempt)
        self._drain.changed()

    def _transferred(self, task: asyncio.Task[None]) -> None:
        self._transfers.discard(task)
        self._drain.changed()

    def _announce_drain(self) -> None:
        for session in self._sessions.values():
            send_unless_ended(session, self._heartbeat())

    def _hand_over(self, error: Draining) -> None:
        for attempt in list(self._attempts.values()):
            self._end(attempt, error)

    def _release_blocks(self, attempt: Attempt) -> None:
        """Frees the blocks once nobody reads them: a transfer by its end, a step in flight by its fence."""
        task = attempt.task
        if task is None or task is asyncio.current_task():
            self._free(attempt.request.block_ids)
            return
        task.cancel()
        task.add_done_callback(lambda _: self._free(attempt.request.block_ids))

    def _free(self, block_ids: list[int]) -> None:
        self._engine.pool.release(block_ids, self._engine.scheduler.fence)
        self._steps.wake()

    def _restore_credit(self, attempt: Attempt) -> None:
        cost, attempt.cost = attempt.cost, 0
        if cost:
            self._tell(self._credits.restore(attempt.session_id, cost))

    def _tell_pair(self, session_id: int, incarnation: int, state: PairState) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            send_unless_ended(session, pair_status(incarnation, state))

    def _tell(self, changes: list[CreditChange]) -> None:
        for change in changes:
            session = self._sessions.get(change.session_id)
            if session is not None:
                for message in credit(change, self._credits.share):
                    send_unless_ended(session, message)

    def _tell_cache(self, session: RouterSession, changes: common_pb2.CacheChanges) -> None:
        send_unless_ended(session, PrefillServiceSessionResponse(cache_changes=changes))

    def _heartbeat(self) -> PrefillServiceSessionResponse:
        return heartbeat(self._engine, is_wedged=self._steps.is_wedged, is_draining=self._drain.is_draining)


def _objection(outcome: Outcome, worker: str) -> KvTransferFailed | None:
    if isinstance(outcome, Gone):
        return KvTransferFailed(f"{worker} refused the KV: {outcome.reason.name}")
    return None
