"""One request's drive: queue, reserve, prefill, decode, and again if a worker fails.

A request is its tokens. An attempt that fails leaves the tokens it delivered;
the next attempt sends them along with the prompt and goes on where they end.
Tokens are deduplicated by index, so none is ever repeated or skipped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvTransferFailed,
    Overloaded,
    PoisonRequest,
    Unavailable,
    from_failure,
)
from baton.limits import Limits
from baton.logs import get_logger
from baton.telemetry import Span, start_span
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest
from router.config import RouterConfig
from router.decode_link import DecodeLink
from router.dispatcher import Assignment, Dispatcher
from router.events import Event, Inbox, LinkLost
from router.fleet import Fleet
from router.prefill_link import PrefillLink
from router.request import GenerationRequest
from router.suspicion import Suspicion
from router.timeline import Timeline
from router.token_stream import TokenStream

log = get_logger(__name__)

# Before a further attempt, doubling, with full jitter: many requests lose the same worker at the same moment.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class _Legs:
    """How far one attempt is: the prefill worker is done with it; its KV is committed."""

    prefill_done: bool
    committed: bool = False


class _GaveWay(Exception):
    """The decode worker gave the request's blocks to older ones; nobody is at fault."""


class Generation:
    """One request from admission to its last token.

    request: validated.
    stream: where tokens go.
    span: parent of every span of this request.
    rng: source of attempt ids.
    beside: a decode worker that has the prompt's KV; the first attempt goes there, without a prefill
        worker, if there is room.

    committed: done once KV was committed, with the worker that has it, or with None once the request
        has ended without.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        config: RouterConfig,
        dispatcher: Dispatcher,
        fleet: Fleet,
        limits: Limits,
        stream: TokenStream,
        timeline: Timeline,
        span: Span,
        rng: random.Random,
        beside: DecodeLink | None = None,
    ) -> None:
        self.request = request
        self.committed: asyncio.Future[DecodeLink | None] = asyncio.get_running_loop().create_future()
        self.token_ids = list(request.output_token_ids)
        self.finish_reason = request.finish_reason
        self._config = config
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._limits = limits
        self._stream = stream
        self._timeline = timeline
        self._span = span
        self._rng = rng
        self._avoid: set[int] = set()
        self._suspicion = Suspicion(fleet)
        self._beside = beside
        # Attempts in a row without a commit.
        self._num_failed = 0
        self._is_placed = False
        self._is_stopped = False

    def stop(self) -> None:
        """The answer is good as it is, whatever else would come; the caller then cancels run()."""
        if not self.finish_reason:
            self._is_stopped = True
            self._dispatcher.retries.succeeded()

    async def run(self) -> None:
        """Runs to the last token; raises the error the client is to see."""
        try:
            if self.finish_reason:
                return
            self._check_fits()
            async with asyncio.timeout_at(self.request.deadline_at):
                await self._run_attempts()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed after {len(self.token_ids)} of at most "
                f"{self.request.params.max_tokens} tokens"
            ) from None
        finally:
            self._stream.end()
            self._commit_known(None)

    async def _run_attempts(self) -> None:
        while True:
            try:
                await self._attempt()
                self._dispatcher.retries.succeeded()
                return
            except _GaveWay:
                # Back to its old place in line; its worker keeps what it can of its KV.
                self._timeline.num_preemptions += 1
            except Overloaded as refusal:
                if not self._timeline.was_dispatched:
                    raise
                # The decode worker's blocks went to somebody else: back into the queue.
                await asyncio.sleep(refusal.retry_after_s or 0.1)
            except Unavailable as error:
                log.info(
                    "attempt failed",
                    request_id=self.request.request_id,
                    code=error.code,
                    reason=error.message,
                )
                if finding := await self._suspicion.verdict():
                    raise PoisonRequest(finding) from error
                self._num_failed += 1
                # Where there are no workers the queue has waited for them already.
                is_last = not self._is_placed or self._num_failed >= self._config.max_attempts
                if is_last or not self._dispatcher.retries.take():
                    raise
                self._timeline.num_attempts += 1
                longest_s = min(FIRST_PAUSE_S * 2 ** (self._num_failed - 1), LONGEST_PAUSE_S)
                await asyncio.sleep(self._rng.uniform(0, longest_s))

    async def _attempt(self) -> None:
        inbox = Inbox(self._rng.randbytes(16))
        self._suspicion.runs_alone = self._is_placed = False
        assignment = await self._queue(inbox.attempt_id)
        self._is_placed = True
        with self._held(assignment, inbox), self._judging(assignment):
            lease = await self._reserve(assignment, inbox)
            if assignment.prefill is not None:
                self._send_prefill(assignment.prefill, assignment, inbox, lease)
            await self._follow(assignment, inbox)

    async def _queue(self, attempt_id: bytes) -> Assignment:
        num_tokens = len(self.request.prompt_token_ids) + len(self.token_ids)
        span = start_span(
            "QUEUED", parent=self._span.traceparent, attributes={"baton.num_tokens": num_tokens}
        )
        beside, self._beside = self._beside, None
        try:
            assignment = beside and self._dispatcher.assign_to(
                beside, attempt_id, num_tokens, self._kv_tokens
            )
            assignment = assignment or await self._dispatcher.assign(
                attempt_id,
                num_tokens,
                self._kv_tokens,
                enqueued_at=self.request.arrived_at,
                # Of n answers the first has passed the queue's bound for all.
                is_new=not self._timeline.was_dispatched and self.request.sample_index == 0,
                avoid=frozenset(self._avoid),
            )
        except BatonError as error:
            span.fail(error)
            raise
        finally:
            span.end()
        computes = assignment.prefill or assignment.decode
        self._timeline.dispatched(computes.name, assignment.decode.name)
        return assignment

    @contextmanager
    def _judging(self, assignment: Assignment) -> Iterator[None]:
        """Tells the breakers how the attempt went, and makes a failed pair the last choice for this request.

        A failure counts against both workers: which of the two it was shows in their next attempts, with
        others. Errors of the request or its client count against nobody; an answer that was stopped is good.
        """
        links = assignment.links
        try:
            yield
        except Unavailable:
            self._avoid |= {link.info.incarnation for link in links}
            now = asyncio.get_running_loop().time()
            for link in links:
                link.breaker.failed(now)
            raise
        except BaseException:
            for link in links:
                if self._is_stopped:
                    link.breaker.succeeded()
                else:
                    link.breaker.ended()
            raise
        for link in links:
            link.breaker.succeeded()

    @contextmanager
    def _held(self, assignment: Assignment, inbox: Inbox) -> Iterator[None]:
        """Whatever happens inside, the attempt ends at both workers and its late events are dropped."""
        try:
            yield
        finally:
            inbox.close()
            for link in assignment.links:
                link.detach(inbox.attempt_id)

    async def _reserve(self, assignment: Assignment, inbox: Inbox) -> decode_service_pb2.Lease:
        try:
            assignment.decode.attach(inbox)
            command = decode_service_pb2.ReserveCommand(
                attempt_id=inbox.attempt_id,
                sequence=self._sequence(),
                compute_locally=assignment.prefill is None,
            )
            assignment.decode.send(DecodeServiceSessionRequest(reserve=command))
            lease = await self._answer(assignment, inbox)
        except BaseException:
            # Whatever went wrong, the prefill worker was never told: its credit is ours again.
            assignment.give_back()
            raise
        self._timeline.reserved()
        return lease

    async def _answer(self, assignment: Assignment, inbox: Inbox) -> decode_service_pb2.Lease:
        try:
            async with asyncio.timeout(self._config.reserve_timeout_s):
                event = await inbox.get()
        except TimeoutError:
            raise Unavailable(f"{assignment.decode.name} did not answer a reservation in time") from None
        match event:
            case decode_service_pb2.ReserveResult():
                if event.HasField("refusal"):
                    raise from_failure(event.refusal.failure)
                return event.lease
            case LinkLost():
                raise event.error
            case _:
                raise InternalError(f"{assignment.decode.name} answered a reservation out of turn")

    def _send_prefill(
        self, prefill: PrefillLink, assignment: Assignment, inbox: Inbox, lease: decode_service_pb2.Lease
    ) -> None:
        decode = assignment.decode
        target = prefill_service_pb2.TransferTarget(
            lease_id=lease.lease_id,
            worker=decode.name,
            incarnation=decode.info.incarnation,
            num_held_tokens=lease.num_held_tokens,
        )
        command = prefill_service_pb2.PrefillCommand(
            attempt_id=inbox.attempt_id,
            sequence=self._sequence(),
            target=target,
            cost_tokens=assignment.cost,
        )
        prefill.attach(inbox)
        prefill.send(PrefillServiceSessionRequest(prefill=command))

    async def _follow(self, assignment: Assignment, inbox: Inbox) -> None:
        """Handles events until both legs are done; raises what ends the attempt."""
        legs = _Legs(prefill_done=assignment.prefill is None)
        while not (self.finish_reason and legs.prefill_done):
            match await inbox.get():
                case common_pb2.TokenEvent() as event:
                    self._deliver(event)
                case common_pb2.PromptLogprobs() as event:
                    self._stream.push_prompt_logprobs(event)
                case common_pb2.AloneStep() as event:
                    self._suspicion.runs_alone = not event.ended
                case prefill_service_pb2.PrefillEnded() as event:
                    legs.prefill_done = True
                    self._timeline.prefill_ended(event)
                    if event.HasField("failure") and not legs.committed:
                        self._prefill_failed(assignment, inbox, from_failure(event.failure))
                case LinkLost(role=common_pb2.ROLE_PREFILL) as event:
                    self._prefill_lost(event, assignment, inbox, legs)
                case event if not self.finish_reason:
                    self._decode_said(event, assignment, legs)

    def _prefill_lost(self, lost: LinkLost, assignment: Assignment, inbox: Inbox, legs: _Legs) -> None:
        if assignment.prefill is not None and not legs.prefill_done and not self.finish_reason:
            self._suspicion.lost(assignment.prefill.info.incarnation)
        legs.prefill_done = True
        if not legs.committed and not self.finish_reason:
            self._prefill_failed(assignment, inbox, lost.error)

    def _decode_said(self, event: Event, assignment: Assignment, legs: _Legs) -> None:
        """What the decode worker says beside tokens; not asked once the answer is complete."""
        match event:
            case decode_service_pb2.LeaseOutcome():
                if not event.HasField("committed"):
                    reason = common_pb2.GoneReason.Name(event.gone).removeprefix("GONE_REASON_")
                    raise KvTransferFailed(f"the lease at {assignment.decode.name} is gone: {reason}")
                legs.committed = True
                self._num_failed = 0
                self._commit_known(assignment.decode)
            case decode_service_pb2.DecodeFailed():
                raise from_failure(event.failure)
            case decode_service_pb2.Preempted():
                raise _GaveWay
            case LinkLost():
                if legs.committed:
                    self._suspicion.lost(assignment.decode.info.incarnation)
                raise event.error

    def _commit_known(self, decode: DecodeLink | None) -> None:
        if not self.committed.done():
            self.committed.set_result(decode)

    def _prefill_failed(self, assignment: Assignment, inbox: Inbox, error: BatonError) -> None:
        """Before the commit is known of, only the decode worker can tell whether it happened."""
        if not isinstance(error, Unavailable):
            raise error
        self._abort_if_uncommitted(assignment, inbox)

    def _abort_if_uncommitted(self, assignment: Assignment, inbox: Inbox) -> None:
        command = decode_service_pb2.AbortIfUncommittedCommand(attempt_id=inbox.attempt_id)
        assignment.decode.send(DecodeServiceSessionRequest(abort_if_uncommitted=command))

    def _deliver(self, event: common_pb2.TokenEvent) -> None:
        known = len(self.token_ids) - event.start_index
        if known < 0:
            raise InternalError(f"token {len(self.token_ids)} is missing: got {event.start_index} instead")
        token_ids = list(event.token_ids)[known:]
        if not token_ids:
            return
        self.token_ids += token_ids
        self._timeline.tokens_arrived(len(token_ids))
        self._stream.push(token_ids, list(event.logprobs)[known:], list(event.top_logprobs)[known:])
        self.finish_reason = event.finish_reason

    @property
    def _kv_tokens(self) -> int:
        return self._limits.kv_tokens(len(self.request.prompt_token_ids), self.request.params.max_tokens)

    def _check_fits(self) -> None:
        """Raises InvalidRequest for a request that no connected decode worker could ever hold."""
        links = list(self._fleet.decode_links())
        if links and not any(link.can_ever_take(self._kv_tokens) for link in links):
            raise InvalidRequest(
                f"prompt and max_tokens need room for {self._kv_tokens} tokens; no decode worker's KV cache "
                "holds that many. Lower max_tokens, shorten the prompt, or raise kv_cache_bytes",
                field="max_tokens",
            )

    def _sequence(self) -> common_pb2.Sequence:
        now = asyncio.get_running_loop().time()
        sequence = self.request.sequence(self.token_ids, now=now, traceparent=self._span.traceparent)
        sequence.alone = self._suspicion.wants_alone
        if self._stream.num_prompt_tokens >= sequence.num_prompt_tokens:
            # The client has them; asking again would keep the prefix cache out of it.
            sequence.sampling.ClearField("prompt_logprobs")
        return sequence
