"""What placement talks about: workers as it sees them, what an attempt needs, and places for it.

Owns the words only; the rule is router/placing/placement.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Costs(Protocol):
    """Predicted times in milliseconds; router/learning/cost_model.py."""

    def prefill_ms(self, worker: int, num_tokens: int, num_cached_tokens: int) -> float:
        """Computing num_tokens after num_cached_tokens."""

    def transfer_ms(self, source: int, target: int, num_tokens: int) -> float:
        """The part of a transfer of num_tokens that nothing hides."""

    def step_ms(
        self, worker: int, num_decoding: int, num_context_tokens: int, num_prompt_tokens: int = 0
    ) -> float:
        """One step of a decode worker."""


class WorkerView(Protocol):
    """What placement must know of any worker, and what it remembers of it.

    turn: when it was last chosen, in choices of this router; 0 before placement has seen it.
    """

    turn: float

    @property
    def incarnation(self) -> int:
        """The process."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one prompt in one step."""

    def is_trusted(self, now: float) -> bool:
        """Whether its breaker lets an attempt pass."""


class PrefillView(WorkerView, Protocol):
    """What placement must know of a prefill worker."""

    @property
    def num_foreign_tokens(self) -> int:
        """Prompt tokens of other routers that wait there, as of its last report."""

    def objection(self, num_tokens: int, num_uncached_tokens: int, seniority: float) -> str:
        """Why it cannot take a prompt now; empty if it can.

        seniority: 0 for the shortest bucket, 1 for the longest.
        """

    def can_ever_take(self, num_tokens: int) -> bool:
        """Whether it could hold such a prompt if it were empty."""

    def work_ahead_ms(self, num_tokens: int, now: float) -> float:
        """Predicted computing of this router's prompts there that goes before one of num_tokens."""

    def can_reach(self, incarnation: int) -> bool:
        """Whether KV can go to that decode worker."""


class DecodeView(WorkerView, Protocol):
    """What placement must know of a decode worker."""

    @property
    def num_decoding(self) -> int:
        """Requests that decode there or will in a moment."""

    @property
    def num_context_tokens(self) -> int:
        """Tokens in their caches."""

    @property
    def num_backlog_tokens(self) -> int:
        """Prompt tokens that it is to compute itself and has not yet."""

    @property
    def mixed_tokens(self) -> int:
        """Most prompt tokens of a step that decodes as well."""

    @property
    def max_running(self) -> int:
        """Most requests in its batch."""

    def objection(self, reserve_tokens: int, expected_tokens: int) -> str:
        """Why it cannot take a request now; empty if it can."""


PrefillT = TypeVar("PrefillT", bound=PrefillView)
DecodeT = TypeVar("DecodeT", bound=DecodeView)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What an attempt needs.

    num_tokens: to compute, cached or not.  reserve_tokens: reserved at the decode worker at first.
    expected_tokens: in its cache at the end, as far as one can tell.  bucket: of its uncached tokens.
    may_be_local: whether the decode worker computes them, in any mode, where no prefill worker can ever hold
        so many.
    cached, held: leading tokens that a prefill or a decode worker has, by incarnation; absent: none.
    avoid: incarnations of workers that failed this request; others are preferred.
    """

    num_tokens: int
    reserve_tokens: int
    expected_tokens: int
    bucket: int = 0
    num_buckets: int = 1
    may_be_local: bool = False
    cached: Mapping[int, int] = field(default_factory=dict)
    held: Mapping[int, int] = field(default_factory=dict)
    avoid: frozenset[int] = frozenset()

    @property
    def seniority(self) -> float:
        """0 for the shortest bucket, 1 for the longest."""
        return self.bucket / max(1, self.num_buckets - 1)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that the answer is expected to get yet."""
        return max(1, self.expected_tokens - self.num_tokens)


# Not frozen: a dozen of them are made per decision, and a frozen one takes three times as long.
@dataclass(slots=True)
class Candidate(Generic[PrefillT, DecodeT]):
    """A place and what is predicted of it, in milliseconds.

    prefill: None where the decode worker computes the prompt.
    """

    prefill: PrefillT | None
    decode: DecodeT
    num_cached_tokens: int
    num_held_tokens: int
    wait_ms: float
    prefill_ms: float
    transfer_ms: float
    itl_ms: float
    score_ms: float
    num_avoided: int = 0

    @property
    def ttft_ms(self) -> float:
        """From placement to the first token."""
        return self.wait_ms + self.prefill_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[PrefillT, DecodeT]):
    """The place taken, the best ones that were not, and workers that could not be.

    others: best first.  excluded: name and reason.  num_candidates: places there were, looked at or not.
    """

    chosen: Candidate[PrefillT, DecodeT]
    others: tuple[Candidate[PrefillT, DecodeT], ...]
    excluded: tuple[tuple[str, str], ...]
    num_candidates: int
