"""When things happened to one answer, and why it went where it did: for Timings and RouteExplain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.errors import BatonError, Draining
from baton.v1 import common_pb2, decode_service_pb2, inference_service_pb2, prefill_service_pb2
from baton.v1.route_explain_pb2 import AttemptExplain, RouteExplain
from baton.v1.route_explain_pb2 import Candidate as CandidateProto
from router.decision_log import DecisionLog
from router.decode_link import DecodeLink
from router.placing.places import Candidate, Decision
from router.prefill_link import PrefillLink

# Of an answer that is tried again and again, the last ones are kept.
MAX_ATTEMPTS = 32


class Timeline:
    """Stamps of one answer.

    A later attempt's times overwrite an earlier one's in Timings, except for the parts of a TTFT that is
    over, and who computed the prompt for it and found how much of it cached; RouteExplain has them all.

    explain: what is known of the answer's way so far; filled further.
    regretted: who computed the prompt of the first token, "local" or "remote"; empty before, and if there was
        no other place.
    log: where it is recorded, under this number.
    is_leaving: whether the router ends what still runs, so that it goes on at another one.
    """

    def __init__(
        self,
        arrived_at: float,
        explain: RouteExplain | None = None,
        log: DecisionLog | None = None,
        number: int = 0,
        *,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_attempts = 1
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_outgrown = 0
        self.num_handovers = 0
        self.explain = explain or RouteExplain()
        self.regretted = ""
        self._log = log
        self._number = number
        self._is_leaving = is_leaving
        self._arrived_at = arrived_at
        self._timings = inference_service_pb2.Timings()
        self._attempt = AttemptExplain()
        # Of the attempt that the first token came from, or may yet come from.
        self._first_prefill: common_pb2.PrefillTimes | None = None
        self._is_first = True
        self._num_tried = 0
        self._is_dispatched = False
        self._best_other_ms: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._num_tokens = 0

    @property
    def was_dispatched(self) -> bool:
        """Whether an attempt ever left the queue."""
        return self._is_dispatched

    @property
    def num_tokens(self) -> int:
        """Tokens that workers have generated."""
        return self._num_tokens

    @property
    def itl_ms(self) -> float:
        """Mean gap between tokens after the first, in milliseconds; 0 before there is one."""
        if self._num_tokens < 2 or self._first_token_at is None or self._last_token_at is None:
            return 0.0
        return 1000 * (self._last_token_at - self._first_token_at) / (self._num_tokens - 1)

    def attempt_begins(self) -> None:
        """An attempt joins the queue."""
        if len(self.explain.attempts) == MAX_ATTEMPTS:
            del self.explain.attempts[0]
        self._num_tried += 1
        self._is_first = self._first_token_at is None
        if self._is_first:
            self._first_prefill = None
        self._attempt = self.explain.attempts.add(number=self._num_tried, queued_at_ms=self._now_ms())

    def queued(self, bucket: str, num_uncached_tokens: int, expected_output_tokens: int) -> None:
        """The first attempt waits in a length bucket; a later one's says nothing of the prompt."""
        if self._is_dispatched:
            return
        self._timings.bucket = self.explain.bucket = bucket
        self.explain.num_uncached_tokens = num_uncached_tokens
        self.explain.expected_output_tokens = expected_output_tokens

    def dispatched(self, prefill_worker: str, decode_worker: str) -> None:
        """The attempt got its workers; the one that computes the prompt may be the decode worker."""
        self._is_dispatched = True
        self._attempt.placed_at_ms = self._now_ms()
        self._timings.decode_worker = decode_worker
        if self._is_first:
            self._timings.prefill_worker = prefill_worker
            self._timings.queue_ms = self._attempt.placed_at_ms

    def had_no_choice(self, decode_worker: str) -> None:
        """It went where another answer to the prompt is."""
        self._attempt.candidates.add(prefill_worker=decode_worker, decode_worker=decode_worker, chosen=True)

    def decided(self, decision: Decision[PrefillLink, DecodeLink]) -> None:
        """Why it got those."""
        others = [candidate.ttft_ms for candidate in decision.others]
        self._best_other_ms = min(others, default=None)
        self._attempt.num_candidates = decision.num_candidates
        candidates = [_candidate(decision.chosen, chosen=True), *map(_candidate, decision.others)]
        candidates += [CandidateProto(decode_worker=name, excluded=why) for name, why in decision.excluded]
        self._attempt.candidates.extend(candidates)
        if self._log is not None:
            self._log.placed(_now(), self._number, attempt=self._num_tried, candidates=candidates)

    def reserved(self) -> None:
        """The decode worker granted a lease."""
        self._attempt.reserved_at_ms = self._now_ms()
        if self._is_first:
            self._timings.reserve_ms = self._attempt.reserved_at_ms - self._attempt.placed_at_ms

    def prompt_computed(self, event: decode_service_pb2.PromptComputed) -> None:
        """The decode worker has computed the prompt itself."""
        self._prefilled(event.prefill)

    def prefill_ended(self, event: prefill_service_pb2.PrefillEnded) -> None:
        """The prefill worker reported its part."""
        self._prefilled(event.prefill)
        for said in (self._timings, self._attempt):
            said.transfer_ms = event.transfer_ms
            said.transfer_bytes = event.transfer_bytes
            said.transfer_tail_ms = event.transfer_tail_ms
            said.transfer_hidden_share = event.transfer_hidden_share
        self._timings.transfer_times.CopyFrom(event.transfer_times)
        if event.HasField("finished"):
            self._timings.decode_worker = ""

    def committed(self) -> None:
        """The KV is at the decode worker, or will be computed there."""
        self._attempt.committed_at_ms = self._now_ms()

    def tokens_arrived(self, count: int) -> None:
        """New tokens reached the router."""
        self._last_token_at = _now()
        attempt = self._attempt
        if not attempt.HasField("first_token_at_ms"):
            attempt.first_token_at_ms = self._now_ms()
        elif not attempt.HasField("decoding_at_ms"):
            attempt.decoding_at_ms = self._now_ms()
        if self._first_token_at is None:
            self._first_token_at = self._last_token_at
            self._regret(attempt)
        self._num_tokens += count

    def gave_way(self, *, is_outgrown: bool) -> None:
        """An attempt has left its decode worker, to be resumed."""
        if is_outgrown:
            self.num_outgrown += 1
        else:
            self.num_preemptions += 1

    def attempt_ended(self, outcome: str, reason: str = "") -> None:
        """The attempt is over: "OK", "PREEMPTED", "OUTGROWN", an error's code, or what cancelled() says."""
        self._attempt.outcome, self._attempt.reason = outcome, reason
        self._attempt.ended_at_ms = self._now_ms()

    def ended(self, error: BaseException | None) -> None:
        """The answer is over. error: what ended it, or None if it is complete."""
        if error is None:
            self.explain.outcome = "OK"
        else:
            self.explain.outcome = error.code if isinstance(error, BatonError) else self.cancelled()
        self.explain.ended_at_ms = self._now_ms()
        if self._log is not None:
            self._record(self._log)

    def cancelled(self) -> str:
        """What it means that something was cancelled: the client left, unless the router does."""
        return Draining.code if self._is_leaving() else "CANCELLED"

    def report(self) -> RouteExplain:
        """The answer's way up to now. The message is the timeline's own, and not to be changed."""
        is_over = self.explain.HasField("ended_at_ms")
        self.explain.reported_at_ms = self.explain.ended_at_ms if is_over else self._now_ms()
        return self.explain

    def timings(self) -> inference_service_pb2.Timings:
        """The summary, up to now."""
        if self._first_token_at is not None and self._last_token_at is not None:
            self._timings.ttft_ms = 1000 * (self._first_token_at - self._arrived_at)
            self._timings.total_ms = 1000 * (self._last_token_at - self._arrived_at)
            self._timings.itl_ms = self.itl_ms
        self._timings.num_attempts = self.num_attempts
        self._timings.num_preemptions = self.num_preemptions
        self._timings.num_outgrown = self.num_outgrown
        self._timings.num_handovers = self.num_handovers
        return self._timings

    def _prefilled(self, times: common_pb2.PrefillTimes) -> None:
        self._attempt.prefill.CopyFrom(times)
        if self._is_first:
            self._first_prefill = times
            self.num_cached_tokens = times.num_cached_tokens
            self._timings.prefill_ms = times.total_ms

    def _regret(self, attempt: AttemptExplain) -> None:
        self.explain.first_token_at_ms = attempt.first_token_at_ms
        if self._best_other_ms is not None:
            measured_ms = attempt.first_token_at_ms - attempt.placed_at_ms
            self.explain.regret_ms = max(0.0, measured_ms - self._best_other_ms)
            is_local = self._timings.prefill_worker == self._timings.decode_worker
            self.regretted = "local" if is_local else "remote"

    def _record(self, log: DecisionLog) -> None:
        has_token = self.explain.HasField("first_token_at_ms")
        log.ended(
            _now(),
            self._number,
            outcome=self.explain.outcome,
            num_output_tokens=self._num_tokens,
            ttft_ms=self.explain.first_token_at_ms if has_token else None,
            itl_ms=self.itl_ms,
            prefill_worker=self._timings.prefill_worker,
            decode_worker=self._timings.decode_worker,
            prefill=self._first_prefill,
            transfer_tail_ms=self._attempt.transfer_tail_ms,
            num_attempts=self.num_attempts,
        )

    def _now_ms(self) -> float:
        return 1000 * (_now() - self._arrived_at)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _candidate(candidate: Candidate[PrefillLink, DecodeLink], *, chosen: bool = False) -> CandidateProto:
    computes = candidate.prefill or candidate.decode
    return CandidateProto(
        prefill_worker=computes.name,
        decode_worker=candidate.decode.name,
        num_cached_tokens=candidate.num_cached_tokens,
        num_held_tokens=candidate.num_held_tokens,
        wait_ms=candidate.wait_ms,
        prefill_ms=candidate.prefill_ms,
        transfer_ms=candidate.transfer_ms,
        itl_ms=candidate.itl_ms,
        score_ms=candidate.score_ms,
        chosen=chosen,
    )
