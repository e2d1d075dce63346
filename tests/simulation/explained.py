"""What routers say of a request's way, held against its laws, and what it shows to have happened.

Reads summaries and refusals only. Knows when each request reached each router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.v1.route_explain_pb2 import AttemptExplain, RouteExplain

# Why a request may be refused as too much, by a part of the words, and what that is called.
REFUSALS = {
    "would come after about": "a strict objective was refused",
    "others came that go first": "a request was displaced",
    "requests are waiting already": "queue overflow",
}


@dataclass(frozen=True, slots=True)
class _Placed:
    """When a request's first attempt joined its queue and left it."""

    priority: int
    queued_at: float
    placed_at: float


class Explained:
    """Ways of the requests of one run.

    hit: told what was reached. is_auto: whether routers may choose who computes a prompt.
    """

    def __init__(self, hit: Callable[[str], None], *, is_auto: bool) -> None:
        self._hit = hit
        self._is_auto = is_auto
        self._arrived_at: dict[tuple[str, str], float] = {}
        self._placed: dict[str, list[_Placed]] = {}

    def arrived(self, router: str, request_id: str, now: float) -> None:
        """A request has reached a router."""
        self._arrived_at[router, request_id] = now

    def refused(self, message: str, *, is_strict: bool) -> None:
        """A request was told that it is too much; raises AssertionError for a reason there is not."""
        found = [point for words, point in REFUSALS.items() if words in message]
        assert found, f"a request was refused: {message}"
        assert is_strict or found != ["a strict objective was refused"], message
        self._hit(found[0])

    def finished(self, router: str, explain: RouteExplain) -> None:
        """A router says how it answered; raises AssertionError if it cannot have been so."""
        name = f"{router} of {explain.request_id}"
        assert explain.outcome == "OK", f"{name}: its answer is complete, and its outcome {explain.outcome}"
        # An answer that was complete when it came needs no attempt.
        if not explain.attempts:
            return
        _check(name, explain)
        self._count(explain.attempts[-1])
        for attempt in explain.attempts:
            if any("answers there will need" in candidate.excluded for candidate in attempt.candidates):
                self._hit("a place was passed over for the growth of the answers there")
        self._overtaken(router, explain)

    def _count(self, attempt: AttemptExplain) -> None:
        chosen = [candidate for candidate in attempt.candidates if candidate.chosen]
        if not self._is_auto or not chosen:
            return
        is_local = chosen[0].prefill_worker == chosen[0].decode_worker
        self._hit(f"in auto, a {'decode' if is_local else 'prefill'} worker computed a prompt")

    def _overtaken(self, router: str, explain: RouteExplain) -> None:
        first = explain.attempts[0]
        if first.number != 1 or not first.HasField("placed_at_ms"):
            return
        base = self._arrived_at[router, explain.request_id]
        new = _Placed(explain.priority, base + first.queued_at_ms / 1000, base + first.placed_at_ms / 1000)
        seen = self._placed.setdefault(router, [])
        if any(_overtook(new, old) or _overtook(old, new) for old in seen):
            self._hit("a higher priority overtook a lower one")
        seen.append(new)


def _overtook(one: _Placed, other: _Placed) -> bool:
    came_later = other.queued_at < one.queued_at < one.placed_at < other.placed_at
    return one.priority > other.priority and came_later


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
