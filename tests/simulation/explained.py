"""What routers say of a request's way, held against its laws, and what it shows to have happened.

Reads summaries and refusals only. Knows when each request reached each router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.v1.inference_service_pb2 import GenerateRequest, Summary
from baton.v1.route_explain_pb2 import AttemptExplain, RouteExplain
from tests.simulation.plan import Plan
from tests.simulation.routing import MAX_WAIT_S

# Why a request may be refused as too much, by a part of the words, and what that is called.
REFUSALS = {
    "would come after about": "a strict objective was refused",
    "wanted sooner than there was a place": "a strict objective was given up while it waited",
    "others came that go first": "a request was displaced",
    "requests are waiting already": "queue overflow",
}

# Two stamps of one moment differ by less.
ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Placed:
    """An attempt that was placed: since when it waited, and when it joined its queue and left it."""

    request_id: str
    priority: int
    waits_since: float
    queued_at: float
    placed_at: float


class Explained:
    """Ways of the requests of one run.

    hit: told what was reached.
    """

    def __init__(self, hit: Callable[[str], None], plan: Plan) -> None:
        self._hit = hit
        self._routing = plan.routing
        self._rope_steps = plan.rope_steps
        # A decode worker that is leaving goes on with its answers by itself, whatever their scale.
        self._has_leavers = any(
            fault.kind == "retire" and fault.target[0].startswith("decode") for fault in plan.faults
        )
        self._arrived_at: dict[tuple[str, str], float] = {}
        self._is_resumed: dict[tuple[str, str], bool] = {}
        self._placed: dict[str, list[_Placed]] = {}

    def arrived(self, router: str, request: GenerateRequest, now: float) -> None:
        """A request has reached a router."""
        self._arrived_at[router, request.request_id] = now
        self._is_resumed[router, request.request_id] = bool(request.partial_answers)

    def refused(self, message: str, *, is_strict: bool) -> None:
        """A request was told that it is too much; raises AssertionError for a reason there is not."""
        found = [point for words, point in REFUSALS.items() if words in message]
        assert found, f"a request was refused: {message}"
        assert is_strict or "a strict objective" not in found[0], message
        self._hit(found[0])

    def finished(self, router: str, summary: Summary) -> None:
        """A router says how it answered; raises AssertionError if it cannot have been so."""
        explain = summary.explain
        name = f"{router} of {explain.request_id}"
        assert explain.outcome == "OK", f"{name}: its answer is complete, and its outcome {explain.outcome}"
        # An answer that was complete when it came needs no attempt.
        if not explain.attempts:
            return
        _check(name, explain)
        self._check_scales(name, summary, is_resumed=self._is_resumed[router, explain.request_id])
        self._count(explain.attempts[-1])
        for attempt in explain.attempts:
            if any("answers there will need" in candidate.excluded for candidate in attempt.candidates):
                self._hit("a place was passed over for the growth of the answers there")
        self._order(router, explain)

    def _count(self, attempt: AttemptExplain) -> None:
        chosen = [candidate for candidate in attempt.candidates if candidate.chosen]
        if self._routing.placement != "auto" or not chosen:
            return
        is_local = chosen[0].prefill_worker == chosen[0].decode_worker
        self._hit(f"in auto, a {'decode' if is_local else 'prefill'} worker computed a prompt")

    def _check_scales(self, name: str, summary: Summary, *, is_resumed: bool) -> None:
        """Attempts end as OUTGROWN where an answer crosses from one scale to the next, and nowhere else."""
        num_prompt, attempts = summary.explain.num_prompt_tokens, summary.explain.attempts
        # Nothing is computed after the last token.
        num_computed = num_prompt + summary.num_output_tokens - 1
        num_borders = sum(num_prompt <= step < num_computed for step in self._rope_steps)
        outcomes = [attempt.outcome for attempt in attempts]
        num_outgrown, what = outcomes.count("OUTGROWN"), f"{name}: {outcomes} over {num_borders} borders"
        assert num_outgrown <= num_borders, what
        if attempts[0].number == 1:
            assert summary.timings.num_outgrown == num_outgrown, what
        # What fails at a border passes it as well; who gives way does so before a border or behind it.
        is_whole = set(outcomes) <= {"OK", "OUTGROWN", "PREEMPTED"} and not is_resumed
        is_plain = is_whole and not self._has_leavers
        assert not is_plain or num_outgrown == num_borders, what

    def _order(self, router: str, explain: RouteExplain) -> None:
        """In which order attempts left the queue."""
        arrived_at = self._arrived_at[router, explain.request_id]
        seen = self._placed.setdefault(router, [])
        new = [
            _Placed(
                explain.request_id,
                explain.priority,
                # What comes back waits anew.
                arrived_at + (attempt.queued_at_ms / 1000 if attempt.number > 1 else 0.0),
                arrived_at + attempt.queued_at_ms / 1000,
                arrived_at + attempt.placed_at_ms / 1000,
            )
            for attempt in explain.attempts
            if attempt.HasField("placed_at_ms")
        ]
        for one in new:
            for old in seen:
                self._compare(one, old)
                self._compare(old, one)
        seen += new

    def _compare(self, one: _Placed, other: _Placed) -> None:
        came_first = other.queued_at < one.placed_at and other.waits_since < one.waits_since
        if not came_first or one.placed_at + ROUNDING_S >= other.placed_at:
            return
        if one.priority > other.priority:
            self._hit("a higher priority overtook a lower one")
        waited_s = one.placed_at - other.waits_since
        # Where there are tenants, one that has had more than its share cannot claim the bound.
        if waited_s > MAX_WAIT_S + ROUNDING_S and not self._routing.weights:
            raise AssertionError(
                f"{one.request_id} overtook {other.request_id}, which had waited for {waited_s:.3f} s"
            )


def _check(name: str, explain: RouteExplain) -> None:
    attempts, last = explain.attempts, explain.attempts[-1]
    assert last.outcome == "OK", f"{name}: the answer is complete, its last attempt {last.outcome}"
    assert last.HasField("first_token_at_ms"), f"{name}: an attempt without tokens completed the answer"
    numbers = [attempt.number for attempt in attempts]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"{name}: attempts {numbers}"
    at_ms = [0.0]
    for attempt in attempts:
        assert attempt.outcome, f"{name}: attempt {attempt.number} is over without an outcome"
        at_ms += _stamps(attempt)
        _check_apart(name, attempt)
    at_ms.append(explain.ended_at_ms)
    assert at_ms == sorted(at_ms), f"{name}: stamps out of order: {at_ms}"
    assert explain.first_token_at_ms <= explain.ended_at_ms, f"{name}: first token after the end"


def _stamps(attempt: AttemptExplain) -> list[Any]:
    """The stamps whose order is fixed."""
    names = ("placed_at_ms", "reserved_at_ms", "first_token_at_ms", "decoding_at_ms", "ended_at_ms")
    set_ones = [getattr(attempt, field) for field in names if attempt.HasField(field)]
    return [attempt.queued_at_ms, *set_ones]


def _check_apart(name: str, attempt: AttemptExplain) -> None:
    """The commit is heard of before or after the first token, but inside its attempt."""
    if attempt.HasField("committed_at_ms"):
        inside = attempt.reserved_at_ms <= attempt.committed_at_ms <= attempt.ended_at_ms
        assert inside, f"{name}: attempt {attempt.number} has its commit outside"
    num_chosen = sum(candidate.chosen for candidate in attempt.candidates)
    is_placed = attempt.HasField("placed_at_ms")
    assert num_chosen == is_placed, f"{name}: attempt {attempt.number} has {num_chosen} places"
