"""A prefill worker that computes nothing: it keeps the session protocol and takes the time its costs say.

Owns its attempts and the credit of its routers' sessions. KV goes to simulated decode workers of the same
process, as a call. Prompts are taken in order of arrival, in chunks, several to a step. There is no prefix
cache.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from baton.errors import BatonError, InternalError, KvTransferFailed, PeerLost
from baton.failure import to_failure
from baton.identity import Identity
from baton.ports import Session
from baton.sessions import converse, first_message
from baton.v1 import common_pb2, prefill_service_pb2
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest, PrefillServiceSessionResponse
from benchmarks.sim_costs import SimCosts, SimSizes, sim_token
from prefill_worker.credits import CreditChange, CreditTable

RouterSession = Session[PrefillServiceSessionResponse, PrefillServiceSessionRequest]
# What the workers of one process say of the way between them.
TRANSPORT = "shm"


class Commits(Protocol):
    """A decode worker, as far as a prefill worker of the same process needs it."""

    def commit(self, lease_id: bytes, first_token: common_pb2.TokenEvent) -> BatonError | None:
        """The KV of a lease is complete; returns why the lease cannot take it, or None."""


@dataclass(slots=True)
class _Attempt:
    command: prefill_service_pb2.PrefillCommand
    session: RouterSession
    session_id: int
    arrived_at: float
    num_left: int
    cost: int
    times: common_pb2.PrefillTimes = field(default_factory=common_pb2.PrefillTimes)
    commit: asyncio.Handle | None = None

    @property
    def attempt_id(self) -> bytes:
        return self.command.attempt_id


class SimPrefill:
    """A simulated prefill worker; run() has to run for as long as it serves sessions.

    decodes: the decode workers of this process by incarnation; it reaches these and no others.
    """

    def __init__(
        self,
        identity: Identity,
        decodes: Mapping[int, Commits],
        *,
        costs: SimCosts = SimCosts(),  # noqa: B008 - frozen
        sizes: SimSizes = SimSizes(),  # noqa: B008 - frozen
    ) -> None:
        self.identity = identity
        self.num_prompts = 0
        self._decodes = decodes
        self._costs = costs
        self._sizes = sizes
        self._credits = CreditTable(sizes.credit_tokens)
        self._sessions: dict[int, RouterSession] = {}
        self._num_sessions = 0
        self._attempts: dict[bytes, _Attempt] = {}
        # Those with tokens left to compute, oldest first.
        self._queue: dict[bytes, _Attempt] = {}
        self._work = asyncio.Event()

    @property
    def num_attempts(self) -> int:
        """Attempts that have not ended."""
        return len(self._attempts)

    async def serve(self, session: RouterSession) -> None:
        """Holds one router's session until it ends; raises PeerLost or IncompatiblePeer."""
        incoming = aiter(session)
        self.identity.check((await first_message(incoming, session.peer)).hello)
        session.send(PrefillServiceSessionResponse(hello=self.identity.hello()))
        session.send(PrefillServiceSessionResponse(capacity=self._capacity()))
        session_id = self._num_sessions = self._num_sessions + 1
        self._sessions[session_id] = session
        self._tell(self._credits.join(session_id))
        try:
            await converse(session, incoming, partial(self._receive, session, session_id), self._heartbeat)
        finally:
            del self._sessions[session_id]
            for attempt in [a for a in self._attempts.values() if a.session_id == session_id]:
                self._end(attempt, cancelled=True)
            self._tell(self._credits.leave(session_id))

    async def run(self) -> None:
        """Runs steps until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            batch = self._next_batch()
            if not batch:
                self._work.clear()
                continue
            began, num_tokens = loop.time(), sum(num for _, num in batch)
            for attempt, _ in batch:
                attempt.times.wait_ms = attempt.times.wait_ms or 1000 * (began - attempt.arrived_at)
            await asyncio.sleep(self._costs.step_ms(num_tokens, 0) / 1000)
            step_ms = 1000 * (loop.time() - began)
            for attempt, num in batch:
                # One that was cancelled meanwhile has left the queue.
                if attempt.attempt_id in self._queue:
                    self._computed(attempt, num, step_ms * num / num_tokens)

    def _next_batch(self) -> list[tuple[_Attempt, int]]:
        batch, room = [], self._sizes.max_batch_tokens
        for attempt in self._queue.values():
            num = min(attempt.num_left, self._sizes.chunk_tokens, room)
            if num == 0:
                break
            batch.append((attempt, num))
            room -= num
        return batch

    def _receive(
        self, session: RouterSession, session_id: int, message: PrefillServiceSessionRequest
    ) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                self._start(session, session_id, message.prefill)
            case "cancel":
                attempt = self._attempts.get(message.cancel.attempt_id)
                if attempt is not None:
                    self._end(attempt, cancelled=True)
            case "credit_return":
                self._tell(self._credits.give_back(session_id, message.credit_return.tokens))
            case "heartbeat":
                self._tell(self._credits.ask_again(session_id))
            case "pair":
                self._send(session, PrefillServiceSessionResponse(pair_status=self._pair(message.pair)))
            case "part":
                pass
            case other:
                raise PeerLost(f"the router sent {other or 'an unknown message'} in mid-session")

    def _start(
        self, session: RouterSession, session_id: int, command: prefill_service_pb2.PrefillCommand
    ) -> None:
        self._credits.spend(session_id, command.cost_tokens)
        attempt = _Attempt(
            command=command,
            session=session,
            session_id=session_id,
            arrived_at=asyncio.get_running_loop().time(),
            num_left=len(command.sequence.token_ids),
            cost=command.cost_tokens,
        )
        if command.attempt_id in self._attempts:
            raise InternalError("the attempt is here already")
        self.num_prompts += 1
        self._attempts[command.attempt_id] = self._queue[command.attempt_id] = attempt
        self._work.set()

    def _computed(self, attempt: _Attempt, num_tokens: int, share_ms: float) -> None:
        attempt.num_left -= num_tokens
        attempt.times.compute_ms += share_ms
        attempt.times.num_steps += 1
        attempt.times.num_computed_tokens += num_tokens
        if attempt.num_left == 0:
            self._sampled(attempt)

    def _sampled(self, attempt: _Attempt) -> None:
        """The first token goes to the router at once; the rest of the transfer follows."""
        loop, sequence = asyncio.get_running_loop(), attempt.command.sequence
        del self._queue[attempt.attempt_id]
        attempt.times.total_ms = 1000 * (loop.time() - attempt.arrived_at)
        self._restore_credit(attempt)
        num_tokens = len(sequence.token_ids)
        token = common_pb2.TokenEvent(
            attempt_id=attempt.attempt_id,
            start_index=num_tokens - sequence.num_prompt_tokens,
            token_ids=[sim_token(num_tokens)],
        )
        is_last = token.start_index + 1 >= sequence.sampling.max_tokens
        if is_last:
            token.finish_reason = common_pb2.FINISH_REASON_LENGTH
        self._send(attempt.session, PrefillServiceSessionResponse(token=token))
        if is_last:
            self._end(attempt, finished=True)
            return
        tail_s = self._costs.tail_ms(num_tokens - attempt.command.target.num_held_tokens) / 1000
        attempt.commit = loop.call_later(tail_s, self._commit, attempt, token, loop.time())

    def _commit(self, attempt: _Attempt, token: common_pb2.TokenEvent, sampled_at: float) -> None:
        target = attempt.command.target
        decode = self._decodes.get(target.incarnation)
        error = (
            KvTransferFailed(f"{target.worker} is not in this process")
            if decode is None
            else decode.commit(target.lease_id, token)
        )
        if error is not None:
            self._end(attempt, failure=to_failure(error))
            return
        tail_ms = 1000 * (asyncio.get_running_loop().time() - sampled_at)
        num_bytes = attempt.times.num_computed_tokens * self._sizes.kv_bytes_per_token
        # A transfer begins with the first chunk that is computed, and computation hides what is not tail.
        transfer_ms = attempt.times.compute_ms + tail_ms
        self._end(
            attempt,
            committed=True,
            transfer_ms=transfer_ms,
            transfer_tail_ms=tail_ms,
            transfer_bytes=num_bytes,
            transfer_hidden_share=attempt.times.compute_ms / transfer_ms if transfer_ms else 0.0,
        )

    def _end(self, attempt: _Attempt, **outcome: object) -> None:
        """The one end of an attempt; the router hears of it."""
        del self._attempts[attempt.attempt_id]
        self._queue.pop(attempt.attempt_id, None)
        self._restore_credit(attempt)
        if attempt.commit is not None:
            attempt.commit.cancel()
        ended = prefill_service_pb2.PrefillEnded(
            attempt_id=attempt.attempt_id,
            prefill=attempt.times,
            **outcome,  # type: ignore[arg-type]
        )
        self._send(attempt.session, PrefillServiceSessionResponse(ended=ended))

    def _restore_credit(self, attempt: _Attempt) -> None:
        cost, attempt.cost = attempt.cost, 0
        if cost:
            self._tell(self._credits.restore(attempt.session_id, cost))

    def _tell(self, changes: list[CreditChange]) -> None:
        share = self._credits.share
        for change in changes:
            if change.granted:
                grant = prefill_service_pb2.CreditGrant(tokens=change.granted, share_tokens=share)
                self._answer(change.session_id, PrefillServiceSessionResponse(credit_grant=grant))
            if change.reclaimed:
                reclaim = prefill_service_pb2.CreditReclaim(tokens=change.reclaimed, share_tokens=share)
                self._answer(change.session_id, PrefillServiceSessionResponse(credit_reclaim=reclaim))

    def _answer(self, session_id: int, message: PrefillServiceSessionResponse) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            self._send(session, message)

    def _send(self, session: RouterSession, message: PrefillServiceSessionResponse) -> None:
        try:
            session.send(message)
        except PeerLost:
            # serve() hears of it too, and ends the session's attempts.
            return

    def _pair(self, command: prefill_service_pb2.PairCommand) -> prefill_service_pb2.PairStatus:
        status = prefill_service_pb2.PairStatus(incarnation=command.incarnation)
        if command.incarnation in self._decodes:
            status.transport = TRANSPORT
        else:
            status.failure.CopyFrom(to_failure(PeerLost(f"{command.worker} is not in this process")))
        return status

    def _capacity(self) -> prefill_service_pb2.PrefillCapacity:
        sizes = self._sizes
        return prefill_service_pb2.PrefillCapacity(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            kv_dtype="float32",
            pid=os.getpid(),
            chunk_tokens=sizes.chunk_tokens,
            max_batch_tokens=sizes.max_batch_tokens,
        )

    def _heartbeat(self) -> PrefillServiceSessionResponse:
        num_started = sum(attempt.times.num_steps > 0 for attempt in self._queue.values())
        heartbeat = prefill_service_pb2.PrefillWorkerHeartbeat(
            num_free_blocks=self._sizes.num_blocks,
            num_running=num_started,
            num_waiting=len(self._queue) - num_started,
            num_backlog_tokens=sum(attempt.num_left for attempt in self._queue.values()),
        )
        return PrefillServiceSessionResponse(heartbeat=heartbeat)
