"""Edges of length buckets, learned so that each bucket carries the same predicted work.

A synchronous core. Work, not requests: one prompt of 8,000 tokens weighs more than a hundred of 40.
"""

from __future__ import annotations

from itertools import pairwise

from baton.errors import ConfigError
from router.learning.decaying_histogram import DecayingHistogram

DEFAULT_EDGES = (128, 256, 512)
# Some 5,000 prompts count: fewer hold too few of the long ones, which carry most of the work. Edges are
# learned from the 512th prompt on and looked at every 64.
DECAY = 0.9998
MIN_PROMPTS = 512
REVIEW_EVERY = 64
# Edges move when a bucket carries this much more or less than its share: labels that change at every review
# would make a dashboard useless, and move the workers' prefixes about.
MAX_DEVIATION = 0.4
# A prediction beyond a day is none.
MAX_WORK_MS = 86_400_000.0


class LearnedEdges:
    """num_buckets - 1 ascending edges; bucket i holds edges[i-1] <= num_tokens < edges[i].

    num_buckets: at least 2.
    min_edge: no edge is lower; a bucket for ten tokens serves nobody.
    default_edges: until enough was seen; their number may differ.
    Raises ConfigError.
    """

    def __init__(
        self,
        num_buckets: int,
        default_edges: tuple[int, ...] = DEFAULT_EDGES,
        *,
        min_edge: int = 16,
        decay: float = DECAY,
    ) -> None:
        if num_buckets < 2:
            raise ConfigError(f"num_buckets is {num_buckets}; it must be at least 2", field="num_buckets")
        self._num_buckets = num_buckets
        self._min_edge = max(min_edge, 1)
        self._edges = default_edges
        self._work = DecayingHistogram(decay)
        self._num_seen = 0

    def observe(self, num_tokens: int, work_ms: float) -> None:
        """A prompt of num_tokens to compute is predicted to take work_ms; what cannot be is ignored."""
        if num_tokens < 1 or not 0 < work_ms <= MAX_WORK_MS:
            return
        self._work.add(num_tokens, work_ms)
        self._num_seen += 1
        if self._num_seen >= MIN_PROMPTS and self._num_seen % REVIEW_EVERY == 0:
            self._review()

    def edges(self) -> tuple[int, ...]:
        """The edges now: strictly ascending, positive. They change in observe() only."""
        return self._edges

    def _review(self) -> None:
        learned = self._balanced()
        before, after = self._deviation(self._edges), self._deviation(learned)
        # The second: where one length carries most of the work no edges are good, and moving mends nothing.
        if len(self._edges) != len(learned) or (before > MAX_DEVIATION and after < before / 2):
            self._edges = learned

    def _balanced(self) -> tuple[int, ...]:
        total, edges = self._work.total, list[int]()
        lowest = self._min_edge
        for i in range(1, self._num_buckets):
            edge = round(self._work.position(total * i / self._num_buckets))
            edges.append(max(edge, lowest))
            lowest = edges[-1] + 1
        return tuple(edges)

    def _deviation(self, edges: tuple[int, ...]) -> float:
        """How far the bucket that is furthest off is from an equal share, relative to that share."""
        below = [0.0, *(self._work.below(edge) for edge in edges), self._work.total]
        equal = self._work.total / self._num_buckets
        return max(abs(high - low - equal) / equal for low, high in pairwise(below))
