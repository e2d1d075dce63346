"""Workers and costs that a test of placement states, so that every score can be worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from router.placing.placement import Placement
from router.placing.places import Ask, Candidate, Decision

# 1 ms per token to compute; 10 ms a step, 1 ms more per answer, 0.5 ms per prompt token beside them.
STEP_MS, ANSWER_MS, PROMPT_MS = 10.0, 1.0, 0.5


@dataclass
class Costs:
    """Of all workers the same, but of those that are slow."""

    slow: dict[int, float] = field(default_factory=dict)
    tail_ms: dict[tuple[int, int], float] = field(default_factory=dict)

    def prefill_ms(self, worker: int, num_tokens: int, num_cached_tokens: int) -> float:
        del num_cached_tokens
        return num_tokens * self.slow.get(worker, 1.0)

    def transfer_ms(self, source: int, target: int, num_tokens: int) -> float:
        del num_tokens
        return self.tail_ms.get((source, target), 0.0)

    def step_ms(
        self, worker: int, num_decoding: int, num_context_tokens: int, num_prompt_tokens: int = 0
    ) -> float:
        del num_context_tokens
        plain = STEP_MS + ANSWER_MS * num_decoding + PROMPT_MS * num_prompt_tokens
        return plain * self.slow.get(worker, 1.0)


@dataclass(eq=False)
class Prefill:
    incarnation: int
    name: str = "p"
    chunk_tokens: int = 128
    num_foreign_tokens: int = 0
    ahead_ms: float = 0.0
    why_not: str = ""
    unreachable: frozenset[int] = frozenset()
    holds: int = 1 << 30
    trusted: bool = True
    turn: float = 0.0

    def objection(self, num_tokens: int, num_uncached_tokens: int, seniority: float) -> str:
        del num_tokens, num_uncached_tokens, seniority
        return self.why_not

    def work_ahead_ms(self, num_tokens: int, now: float) -> float:
        del num_tokens, now
        return self.ahead_ms

    def can_ever_take(self, num_tokens: int) -> bool:
        return num_tokens <= self.holds

    def can_reach(self, incarnation: int) -> bool:
        return incarnation not in self.unreachable

    def is_trusted(self, now: float) -> bool:
        del now
        return self.trusted


@dataclass(eq=False)
class Decode:
    incarnation: int
    name: str = "d"
    num_decoding: int = 0
    num_context_tokens: int = 0
    num_backlog_tokens: int = 0
    chunk_tokens: int = 128
    mixed_tokens: int = 64
    max_running: int = 64
    why_not: str = ""
    trusted: bool = True
    turn: float = 0.0

    def objection(self, reserve_tokens: int, expected_tokens: int) -> str:
        del reserve_tokens, expected_tokens
        return self.why_not

    def is_trusted(self, now: float) -> bool:
        del now
        return self.trusted


Chosen = Decision[Prefill, Decode]


def ask(num_tokens: int = 100, *, num_new: int = 10, **more: Any) -> Ask:
    expected = num_tokens + num_new
    return Ask(num_tokens=num_tokens, reserve_tokens=num_tokens + 1, expected_tokens=expected, **more)


def placement(
    costs: Costs | None = None,
    mode: str = "disaggregated",
    seed: int = 0,
    distance: Callable[[int, int], int] = lambda _bucket, _worker: 0,
    **more: Any,
) -> Placement[Prefill, Decode]:
    rng = random.Random(seed)
    return Placement(costs or Costs(), rng=rng, mode=mode, distance=distance, **more)


def chosen(decision: Chosen | None) -> Candidate[Prefill, Decode]:
    assert decision is not None
    return decision.chosen
