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

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    PoisonRequest,
    Unavailable,
)
from baton.limits import Limits
from baton.logs import get_logger
from baton.prefix_keys import rope_salt
from baton.telemetry import Span, start_span
from baton.v1 import common_pb2
from router.assignment import Assignment, Wanted
from router.attempt import Attempt, GaveWay
from router.config import RouterConfig
from router.decode_link import DecodeLink
from router.dispatcher import Dispatcher
from router.events import Inbox
from router.fleet import Fleet
from router.outlook import Outlook
from router.placing.prompt_keys import PromptKeys
from router.request import GenerationRequest
from router.suspicion import Suspicion
from router.timeline import Timeline
from router.token_stream import TokenStream

log = get_logger(__name__)

# Before a further attempt, doubling, with full jitter: many requests lose the same worker at the same moment.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0


class Generation:
    """One request from admission to its last token.

    request: validated.
    stream: where tokens go.
    outlook: hears what is measured.
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
        outlook: Outlook,
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
        self._outlook = outlook
        # Attempts in a row without a commit.
        self._num_failed = 0
        self._is_placed = False
        self._is_stopped = False
        self._is_over = False

    def stop(self) -> None:
        """The answer is good as it is, whatever else would come; the caller then cancels run()."""
        if not self._is_over:
            self._is_stopped = True
            self._count_success()

    async def run(self) -> None:
        """Runs to the last token; raises the error the client is to see."""
        try:
            if not self.finish_reason:
                self._check_fits()
                async with asyncio.timeout_at(self.request.deadline_at):
                    await self._run_attempts()
        except TimeoutError:
            late = DeadlineExceeded(
                f"the deadline passed after {len(self.token_ids)} of at most "
                f"{self.request.params.max_tokens} tokens"
            )
            self._timeline.ended(late)
            raise late from None
        except BaseException as error:
            self._timeline.ended(None if self._is_stopped else error)
            raise
        else:
            self._timeline.ended(None)
        finally:
            self._is_over = True
            self._regret()
            self._stream.end()
            self._commit_known(None)

    def _count_success(self) -> None:
        self._dispatcher.retries.succeeded()
        self._outlook.answered(self.request.params.max_tokens, len(self.token_ids))

    def _regret(self) -> None:
        """How much sooner the first token might have come, had another place been taken."""
        if self._timeline.regretted:
            self._outlook.metrics.regretted(self._timeline.regretted, self._timeline.explain.regret_ms)

    async def _run_attempts(self) -> None:
        while True:
            try:
                await self._attempt()
                if not self._is_stopped:
                    self._count_success()
                return
            except GaveWay as left:
                # Back to its old place in line. Its worker keeps what it can of its KV; where a scale step is
                # outgrown all of it is computed anew.
                self._timeline.gave_way(is_outgrown=left.is_outgrown)
            except Draining as handover:
                # Likewise. Who leaves is not asked again: that is known before its attempts hear of it.
                self._timeline.num_handovers += 1
                log.info("attempt handed over", request_id=self.request.request_id, reason=handover.message)
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
        with self._told():
            assignment = await self._queue(inbox.attempt_id)
            self._is_placed = True
            with self._held(assignment, inbox), self._judging(assignment):
                attempt = Attempt(
                    self,
                    assignment,
                    inbox,
                    config=self._config,
                    timeline=self._timeline,
                    outlook=self._outlook,
                    suspicion=self._suspicion,
                )
                await attempt.run()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """The timeline hears how the attempt ends."""
        self._timeline.attempt_begins()
        try:
            yield
        except GaveWay as left:
            self._timeline.attempt_ended(left.outcome, left.reason)
            raise
        except BatonError as error:
            self._timeline.attempt_ended(error.code, error.message)
            raise
        except BaseException:
            self._timeline.attempt_ended("OK" if self._is_stopped else self._timeline.cancelled())
            raise
        self._timeline.attempt_ended("OK")

    async def _queue(self, attempt_id: bytes) -> Assignment:
        wanted = self._wanted(attempt_id)
        span = start_span(
            "QUEUED", parent=self._span.traceparent, attributes={"baton.num_tokens": wanted.num_tokens}
        )
        beside, self._beside = self._beside, None
        try:
            assignment = beside and self._dispatcher.assign_to(beside, wanted)
            assignment = assignment or await self._dispatcher.assign(wanted)
        except BatonError as error:
            span.fail(error)
            raise
        finally:
            span.end()
        self._note(assignment)
        return assignment

    def _note(self, assignment: Assignment) -> None:
        timeline = self._timeline
        if assignment.decision is not None:
            expected = self._expected_tokens + 1 - len(self.request.prompt_token_ids)
            timeline.queued(assignment.bucket, assignment.num_uncached_tokens, max(1, expected))
        timeline.dispatched((assignment.prefill or assignment.decode).name, assignment.decode.name)
        if assignment.decision is None:
            timeline.had_no_choice(assignment.decode.name)
        else:
            timeline.decided(assignment.decision)

    def _wanted(self, attempt_id: bytes) -> Wanted:
        request = self.request
        num_prompt, num_output = len(request.prompt_token_ids), len(self.token_ids)
        return Wanted(
            attempt_id=attempt_id,
            num_tokens=num_prompt + num_output,
            kv_tokens=self._kv_tokens,
            # It leaves once it has outgrown its scale step, with the token that shows it.
            expected_tokens=min(self._expected_tokens, self._limits.rope_border(num_prompt + num_output) + 1),
            keys=self._keys(),
            may_be_local=num_output > 0 and not self._wants_scores,
            arrived_at=request.arrived_at,
            due_at=request.arrived_at + request.objective_ms(self._config) / 1000,
            is_strict=request.ttft_objective_ms is not None,
            # Of n answers the first has passed the queue's bound for all.
            is_new=not self._timeline.was_dispatched and request.sample_index == 0,
            tenant=request.tenant,
            weight=request.weight,
            priority=request.priority,
            avoid=frozenset(self._avoid),
        )

    def _keys(self) -> PromptKeys | None:
        """The prefix keys of its tokens; None where their KV has to be computed whatever is cached."""
        request = self.request
        if self._wants_scores:
            return None
        token_ids = [*request.prompt_token_ids, *self.token_ids]
        salt = rope_salt(request.cache_salt, self._limits.rope_step(len(token_ids)))
        return PromptKeys(token_ids, salt)

    @contextmanager
    def _judging(self, assignment: Assignment) -> Iterator[None]:
        """Tells the breakers how the attempt went, and makes a failed pair the last choice for this request.

        A failure counts against both workers: which of the two it was shows in their next attempts, with
        others. Errors of the request or its client count against nobody, nor that a worker leaves; an answer
        that was stopped is good.
        """
        links = assignment.links
        try:
            yield
        except Draining:
            for link in links:
                link.breaker.ended()
            raise
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

    def committed_at(self, decode: DecodeLink) -> None:
        """An attempt's KV is at that worker."""
        self._num_failed = 0
        self._commit_known(decode)

    def _commit_known(self, decode: DecodeLink | None) -> None:
        if not self.committed.done():
            self.committed.set_result(decode)

    def deliver(self, event: common_pb2.TokenEvent) -> None:
        """Takes the tokens of an event that are new."""
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
    def _wants_scores(self) -> bool:
        """Whether log-probabilities of the prompt are wanted that the client has not got yet."""
        is_wanted = self.request.params.prompt_logprobs is not None
        return is_wanted and self._stream.num_prompt_tokens < len(self.request.prompt_token_ids)

    @property
    def _expected_tokens(self) -> int:
        """Tokens that are expected to be in a cache at its end, over all attempts."""
        num_prompt, max_tokens = len(self.request.prompt_token_ids), self.request.params.max_tokens
        return self._outlook.expected_tokens(num_prompt, len(self.token_ids), max_tokens)

    @property
    def _kv_tokens(self) -> int:
        return self._limits.kv_tokens(len(self.request.prompt_token_ids), self.request.params.max_tokens)

    def _check_fits(self) -> None:
        """Raises InvalidRequest for one that no connected worker can ever hold, nor one that was of late."""
        fit, num_tokens = self._dispatcher.fit, len(self.request.prompt_token_ids)
        if not fit.may_hold(common_pb2.ROLE_DECODE, self._kv_tokens):
            raise InvalidRequest(
                f"prompt and max_tokens need room for {self._kv_tokens} tokens; no decode worker's KV cache "
                "holds that many. Lower max_tokens, shorten the prompt, or raise kv_cache_bytes",
                field="max_tokens",
            )
        # A decode worker computes what no prefill worker holds, unless prompts are the others' alone.
        if self._fleet.needs_prefill and not fit.may_hold(common_pb2.ROLE_PREFILL, num_tokens):
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens; no prefill worker's KV cache holds that many. Shorten "
                "the prompt, or raise kv_cache_bytes",
                field="prompt",
            )

    def deliver_scores(self, event: common_pb2.PromptLogprobs) -> None:
        """Takes log-probabilities of the prompt."""
        self._stream.push_prompt_logprobs(event)

    def stamp(self, sequence: common_pb2.Sequence) -> None:
        """Brings what depends on the time up to date."""
        self.request.stamp(sequence, asyncio.get_running_loop().time())

    def sequence(self) -> common_pb2.Sequence:
        """The request as workers get it now."""
        now = asyncio.get_running_loop().time()
        sequence = self.request.sequence(self.token_ids, now=now, traceparent=self._span.traceparent)
        sequence.alone = self._suspicion.wants_alone
        sequence.rope_step = self._limits.rope_step(len(sequence.token_ids))
        if not self._wants_scores:
            # The client has them; asking again would keep the prefix cache out of it.
            sequence.sampling.ClearField("prompt_logprobs")
        return sequence
