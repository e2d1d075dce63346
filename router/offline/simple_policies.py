"""Policies to compare with: what routers do that know nothing, or little, of the work. Each is one screen.

Where a fleet has no prefill workers, decode workers compute the prompts, under every policy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.offline.policy import Fleet, LinePolicy, Place, with_room
from router.offline.recording import RecordedRequest
from router.offline.simulated_worker import SimulatedWorker

# Prompt tokens that a prefill worker is given at once; the default of its setting credit_tokens.
CREDIT_TOKENS = 4096


class RoundRobin(LinePolicy):
    """Workers of either role take turns."""

    name = "round-robin"

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def choose(self, request: RecordedRequest, fleet: Fleet) -> Place | None:
        """The next of each role; of decode workers the next with room."""
        able = with_room(request, _turned(fleet.decodes, self._turn))
        if not able:
            return None
        decode = able[0]
        prefill = _turned(fleet.prefills, self._turn)[0] if fleet.prefills else decode
        self._turn += 1
        return prefill, decode


class Random(LinePolicy):
    """Anybody, with equal chance."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def choose(self, request: RecordedRequest, fleet: Fleet) -> Place | None:
        """One of each role; of decode workers one with room."""
        able = with_room(request, fleet.decodes)
        if not able:
            return None
        decode = self._rng.choice(able)
        return (self._rng.choice(fleet.prefills) if fleet.prefills else decode), decode


class LeastTokens(LinePolicy):
    """The prefill worker with the fewest tokens to compute, the decode worker with the fewest requests."""

    name = "least-tokens"

    def choose(self, request: RecordedRequest, fleet: Fleet) -> Place | None:
        """The least busy of each role."""
        decode = _least_requests(request, fleet)
        if decode is None:
            return None
        return _least_tokens(fleet.prefills) if fleet.prefills else decode, decode


class StaticBuckets(LinePolicy):
    """Each length range has prefill workers of its own: a range that is not busy leaves its workers idle.

    edges: of the ranges, in prompt tokens. With fewer workers than ranges, the longest ranges share the last.
    """

    name = "static-buckets"

    def __init__(self, edges: Sequence[int]) -> None:
        super().__init__()
        self._edges = tuple(edges)

    def choose(self, request: RecordedRequest, fleet: Fleet) -> Place | None:
        """The least busy of those that own the range."""
        decode = _least_requests(request, fleet)
        if decode is None:
            return None
        if not fleet.prefills:
            return decode, decode
        return _least_tokens(self._owners(request.num_prompt_tokens, fleet.prefills)), decode

    def _owners(self, num_tokens: int, prefills: Sequence[SimulatedWorker]) -> Sequence[SimulatedWorker]:
        """The workers are dealt out to the ranges, as evenly as their number allows."""
        num_ranges = len(self._edges) + 1
        index = sum(num_tokens >= edge for edge in self._edges)
        if len(prefills) < num_ranges:
            return [prefills[min(index, len(prefills) - 1)]]
        return prefills[index * len(prefills) // num_ranges : (index + 1) * len(prefills) // num_ranges]


class Fifo(LinePolicy):
    """In order of arrival, bound late: the head waits until a worker has credit for its whole prompt."""

    name = "fifo"

    def choose(self, request: RecordedRequest, fleet: Fleet) -> Place | None:
        """The first prefill worker with credit."""
        decode = _least_requests(request, fleet)
        if decode is None:
            return None
        if not fleet.prefills:
            return decode, decode
        cost = min(request.num_prompt_tokens, CREDIT_TOKENS)
        for prefill in fleet.prefills:
            if prefill.num_backlog_tokens + cost <= CREDIT_TOKENS:
                return prefill, decode
        return None


def _turned(workers: Sequence[SimulatedWorker], turn: int) -> list[SimulatedWorker]:
    """The workers, beginning with the one whose turn it is."""
    return [workers[(turn + index) % len(workers)] for index in range(len(workers))]


def _least_tokens(workers: Sequence[SimulatedWorker]) -> SimulatedWorker:
    return min(workers, key=lambda worker: worker.num_backlog_tokens)


def _least_requests(request: RecordedRequest, fleet: Fleet) -> SimulatedWorker | None:
    able = with_room(request, fleet.decodes)
    return min(able, key=lambda worker: len(worker.placed)) if able else None
