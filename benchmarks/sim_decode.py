"""A decode worker that computes nothing: it keeps the session protocol and takes the time its costs say.

Owns its attempts, their leases and its count of free blocks. A step gives one token to every request in the
batch, and one message per router carries them. It computes prompts itself where it is told so, in chunks
beside what it decodes. It has no prefix cache, and leases live as long as their router's session.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field
from functools import partial

from baton.errors import BatonError, KvTransferFailed, Overloaded, PeerLost
from baton.failure import to_failure
from baton.identity import Identity
from baton.limits import blocks_needed
from baton.ports import Session
from baton.sessions import SILENCE_S, converse, first_message
from baton.v1 import common_pb2, decode_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from benchmarks.sim_costs import SimCosts, SimSizes, sim_token

RouterSession = Session[DecodeServiceSessionResponse, DecodeServiceSessionRequest]
RETRY_S = 0.1


@dataclass(slots=True, eq=False)
class _Attempt:
    attempt_id: bytes
    session: RouterSession
    lease_id: bytes
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int
    num_blocks: int
    arrived_at: float
    # Of the prompt, where this worker computes it itself.
    num_left: int = 0
    times: common_pb2.PrefillTimes = field(default_factory=common_pb2.PrefillTimes)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class SimDecode:
    """A simulated decode worker; run() has to run for as long as it serves sessions.

    transfer_address: what routers tell prefill workers; nobody listens there.
    rng: source of lease ids.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        costs: SimCosts = SimCosts(),  # noqa: B008 - frozen
        sizes: SimSizes = SimSizes(),  # noqa: B008 - frozen
        transfer_address: str = "127.0.0.1:1",
        rng: random.Random,
    ) -> None:
        self.identity = identity
        self.transfer_address = transfer_address
        self.num_tokens = 0
        self._costs = costs
        self._sizes = sizes
        self._rng = rng
        self._num_free_blocks = sizes.num_blocks
        self._attempts: dict[bytes, _Attempt] = {}
        self._leases: dict[bytes, _Attempt] = {}
        # Oldest first; those that still compute their prompt, and those that decode.
        self._prompts: dict[bytes, _Attempt] = {}
        self._running: dict[bytes, _Attempt] = {}
        self._work = asyncio.Event()

    @property
    def num_attempts(self) -> int:
        """Attempts that have not ended."""
        return len(self._attempts)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that attempts hold."""
        return self._sizes.num_blocks - self._num_free_blocks

    async def serve(self, session: RouterSession) -> None:
        """Holds one router's session until it ends; raises PeerLost or IncompatiblePeer."""
        incoming = aiter(session)
        self.identity.check((await first_message(incoming, session.peer)).hello)
        session.send(DecodeServiceSessionResponse(hello=self.identity.hello()))
        session.send(DecodeServiceSessionResponse(capacity=self._capacity()))
        try:
            await converse(session, incoming, partial(self._receive, session), self._heartbeat)
        finally:
            for attempt in [a for a in self._attempts.values() if a.session is session]:
                self._end(attempt)

    def commit(self, lease_id: bytes, first_token: common_pb2.TokenEvent) -> BatonError | None:
        """The KV of a lease is complete, the request decodes. Returns why it cannot, or None."""
        attempt = self._leases.pop(lease_id, None)
        if attempt is None:
            return KvTransferFailed(f"{self.identity.name} has no such lease")
        self._send_committed(attempt)
        self._send_step(attempt.session, [first_token], None)
        attempt.num_tokens += 1
        self._running[attempt.attempt_id] = attempt
        self._work.set()
        return None

    async def run(self) -> None:
        """Runs steps until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            batch = list(self._running.values())[: self._sizes.max_running]
            chunk = self._next_chunk(beside=bool(batch))
            if not batch and chunk is None:
                self._work.clear()
                continue
            began, num_prompt_tokens = loop.time(), chunk[1] if chunk else 0
            await asyncio.sleep(self._costs.step_ms(num_prompt_tokens, len(batch)) / 1000)
            load = decode_service_pb2.StepLoad(
                duration_ms=1000 * (loop.time() - began),
                num_decoding=len(batch),
                num_context_tokens=sum(attempt.num_tokens for attempt in batch),
                num_prompt_tokens=num_prompt_tokens,
            )
            self._step_ended(batch, chunk, load)

    def _next_chunk(self, *, beside: bool) -> tuple[_Attempt, int] | None:
        """The oldest prompt's next tokens."""
        attempt = next(iter(self._prompts.values()), None)
        if attempt is None:
            return None
        room = self._sizes.mixed_tokens if beside else self._sizes.max_batch_tokens
        return attempt, min(attempt.num_left, self._sizes.chunk_tokens, room)

    def _step_ended(
        self,
        batch: list[_Attempt],
        chunk: tuple[_Attempt, int] | None,
        load: decode_service_pb2.StepLoad,
    ) -> None:
        by_session: dict[RouterSession, list[common_pb2.TokenEvent]] = {}
        if chunk is not None and chunk[0].attempt_id in self._prompts and self._computed(*chunk, load):
            batch = [*batch, chunk[0]]
        for attempt in batch:
            # Others may have left, or given way, while the step ran.
            if attempt.attempt_id in self._running and self._grow(attempt):
                by_session.setdefault(attempt.session, []).append(self._next_token(attempt))
        for session, tokens in by_session.items():
            self._send_step(session, tokens, load)

    def _computed(self, attempt: _Attempt, num_tokens: int, load: decode_service_pb2.StepLoad) -> bool:
        """A chunk of a prompt is computed; returns whether it was the last."""
        attempt.num_left -= num_tokens
        times = attempt.times
        times.compute_ms += load.duration_ms * num_tokens / (num_tokens + load.num_decoding)
        times.num_steps += 1
        times.num_computed_tokens += num_tokens
        if attempt.num_left:
            return False
        times.total_ms = 1000 * (asyncio.get_running_loop().time() - attempt.arrived_at)
        computed = decode_service_pb2.PromptComputed(attempt_id=attempt.attempt_id, prefill=times)
        self._send(attempt.session, DecodeServiceSessionResponse(prompt_computed=computed))
        del self._prompts[attempt.attempt_id]
        self._running[attempt.attempt_id] = attempt
        return True

    def _next_token(self, attempt: _Attempt) -> common_pb2.TokenEvent:
        event = common_pb2.TokenEvent(
            attempt_id=attempt.attempt_id,
            start_index=attempt.num_output_tokens,
            token_ids=[sim_token(attempt.num_tokens)],
        )
        attempt.num_tokens += 1
        self.num_tokens += 1
        if attempt.num_output_tokens >= attempt.max_tokens:
            event.finish_reason = common_pb2.FINISH_REASON_LENGTH
            self._end(attempt)
        return event

    def _grow(self, attempt: _Attempt) -> bool:
        """Room for the KV of one more token; the youngest gives way where there is none."""
        while blocks_needed(attempt.num_tokens, self._sizes.block_size) > attempt.num_blocks:
            if self._num_free_blocks == 0:
                youngest = list(self._running.values())[-1]
                preempted = decode_service_pb2.Preempted(attempt_id=youngest.attempt_id)
                self._send(youngest.session, DecodeServiceSessionResponse(preempted=preempted))
                self._end(youngest)
                if youngest is attempt:
                    return False
                continue
            self._num_free_blocks -= 1
            attempt.num_blocks += 1
        return True

    def _receive(self, session: RouterSession, message: DecodeServiceSessionRequest) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(session, message.reserve)
            case "release":
                attempt = self._attempts.get(message.release.attempt_id)
                if attempt is not None:
                    self._end(attempt)
            case "abort_if_uncommitted":
                self._abort_if_uncommitted(session, message.abort_if_uncommitted.attempt_id)
            case "heartbeat":
                pass
            case other:
                raise PeerLost(f"the router sent {other or 'an unknown message'} in mid-session")

    def _reserve(self, session: RouterSession, command: decode_service_pb2.ReserveCommand) -> None:
        sequence = command.sequence
        num_blocks = blocks_needed(len(sequence.token_ids) + 1, self._sizes.block_size)
        result = decode_service_pb2.ReserveResult(attempt_id=command.attempt_id)
        if num_blocks > self._num_free_blocks:
            full = Overloaded(f"{self.identity.name} has too few free blocks", retry_after_s=RETRY_S)
            result.refusal.failure.CopyFrom(to_failure(full))
        else:
            result.lease.CopyFrom(self._grant(session, command, num_blocks))
        result.num_free_blocks = self._num_free_blocks
        self._send(session, DecodeServiceSessionResponse(reserve_result=result))
        if command.compute_locally and result.HasField("lease"):
            self._compute_locally(result.lease.lease_id)

    def _grant(
        self, session: RouterSession, command: decode_service_pb2.ReserveCommand, num_blocks: int
    ) -> decode_service_pb2.Lease:
        sequence = command.sequence
        attempt = _Attempt(
            attempt_id=command.attempt_id,
            session=session,
            lease_id=self._rng.randbytes(16),
            num_prompt_tokens=sequence.num_prompt_tokens,
            max_tokens=sequence.sampling.max_tokens,
            num_tokens=len(sequence.token_ids),
            num_blocks=num_blocks,
            arrived_at=asyncio.get_running_loop().time(),
        )
        self._num_free_blocks -= num_blocks
        self._attempts[attempt.attempt_id] = self._leases[attempt.lease_id] = attempt
        return decode_service_pb2.Lease(lease_id=attempt.lease_id, ttl_ms=round(1000 * 5 * SILENCE_S))

    def _compute_locally(self, lease_id: bytes) -> None:
        attempt = self._leases.pop(lease_id)
        attempt.num_left = attempt.num_tokens
        self._prompts[attempt.attempt_id] = attempt
        self._send_committed(attempt)
        self._work.set()

    def _abort_if_uncommitted(self, session: RouterSession, attempt_id: bytes) -> None:
        attempt = self._attempts.get(attempt_id)
        outcome = decode_service_pb2.LeaseOutcome(attempt_id=attempt_id)
        if attempt is not None and attempt.lease_id not in self._leases:
            outcome.committed = True
        else:
            outcome.gone = common_pb2.GONE_REASON_CANCELLED
            if attempt is not None:
                self._end(attempt)
        self._send(session, DecodeServiceSessionResponse(lease_outcome=outcome))

    def _end(self, attempt: _Attempt) -> None:
        """The one end of an attempt: its blocks are free again."""
        del self._attempts[attempt.attempt_id]
        self._leases.pop(attempt.lease_id, None)
        self._prompts.pop(attempt.attempt_id, None)
        self._running.pop(attempt.attempt_id, None)
        self._num_free_blocks += attempt.num_blocks

    def _send_committed(self, attempt: _Attempt) -> None:
        outcome = decode_service_pb2.LeaseOutcome(attempt_id=attempt.attempt_id, committed=True)
        self._send(attempt.session, DecodeServiceSessionResponse(lease_outcome=outcome))

    def _send_step(
        self,
        session: RouterSession,
        tokens: list[common_pb2.TokenEvent],
        load: decode_service_pb2.StepLoad | None,
    ) -> None:
        step = decode_service_pb2.StepEvents(tokens=tokens, num_free_blocks=self._num_free_blocks, load=load)
        self._send(session, DecodeServiceSessionResponse(step=step))

    def _send(self, session: RouterSession, message: DecodeServiceSessionResponse) -> None:
        try:
            session.send(message)
        except PeerLost:
            # serve() hears of it too, and ends the session's attempts.
            return

    def _capacity(self) -> decode_service_pb2.DecodeCapacity:
        sizes = self._sizes
        return decode_service_pb2.DecodeCapacity(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            kv_dtype="float32",
            transfer_address=self.transfer_address,
            pid=os.getpid(),
            mixed_tokens=sizes.mixed_tokens,
            max_running=sizes.max_running,
            chunk_tokens=sizes.chunk_tokens,
            max_batch_tokens=sizes.max_batch_tokens,
        )

    def _heartbeat(self) -> DecodeServiceSessionResponse:
        heartbeat = decode_service_pb2.DecodeWorkerHeartbeat(
            num_free_blocks=self._num_free_blocks,
            num_running=len(self._running),
            num_leases=len(self._leases),
            num_context_tokens=sum(attempt.num_tokens for attempt in self._running.values()),
            num_backlog_tokens=sum(attempt.num_left for attempt in self._prompts.values()),
        )
        return DecodeServiceSessionResponse(heartbeat=heartbeat)
