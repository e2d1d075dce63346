"""A histogram of token counts that forgets: what was seen lately, in bins that grow with the length.

A synchronous core of fixed size. Bins are single counts up to 16 and some 9 % wide from there on; inside a
bin all counts are taken for equally likely.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

BINS_PER_OCTAVE = 8
# Longer counts share the last bin.
MAX_TOKENS = 2**22
# Weights grow instead of shrinking, so that an addition touches one bin; beyond this they are all scaled
# down.
MAX_UNIT = 1e100


def _bin_edges() -> list[int]:
    """Bin i holds edges[i] <= count < edges[i + 1]."""
    edges = [0, 1]
    while edges[-1] < MAX_TOKENS:
        edges.append(max(edges[-1] + 1, round(edges[-1] * 2 ** (1 / BINS_PER_OCTAVE))))
    return edges


EDGES = _bin_edges()


class DecayingHistogram:
    """Weights of token counts. decay: what one addition leaves of the weight of those before it."""

    def __init__(self, decay: float) -> None:
        self._growth = 1 / decay
        self._unit = 1.0
        self._weights = [0.0] * (len(EDGES) - 1)
        self._below: list[float] | None = None

    @property
    def total(self) -> float:
        """The weight of everything, where the latest addition counts in full."""
        return self._cumulative()[-1] / self._unit

    def add(self, num_tokens: int, weight: float = 1.0) -> None:
        """Adds weight (finite, not negative) to a count."""
        self._unit *= self._growth
        if self._unit > MAX_UNIT:
            self._weights = [value / self._unit for value in self._weights]
            self._unit = 1.0
        self._weights[_bin(num_tokens)] += weight * self._unit
        self._below = None

    def below(self, num_tokens: float) -> float:
        """The weight of counts under num_tokens."""
        i = _bin(num_tokens)
        share = min((num_tokens - EDGES[i]) / (EDGES[i + 1] - EDGES[i]), 1.0)
        below = self._cumulative()
        return (below[i] + share * (below[i + 1] - below[i])) / self._unit

    def position(self, weight: float) -> float:
        """The smallest x with below(x) >= weight: the inverse of below(), for 0 < weight <= total."""
        below = self._cumulative()
        weight *= self._unit
        i = min(bisect_left(below, weight, 1), len(below) - 1) - 1
        inside = below[i + 1] - below[i]
        share = min(max((weight - below[i]) / inside, 0.0), 1.0) if inside > 0 else 0.0
        return EDGES[i] + share * (EDGES[i + 1] - EDGES[i])

    def quantile(self, fraction: float, above: int = -1) -> int:
        """The smallest count not exceeded by `fraction` of the weight over `above`; there must be some."""
        start = self.below(above + 1)
        position = self.position(start + fraction * (self.total - start))
        # Sums are off by some 1e-16 each: a whole number must not become the next one.
        return max(math.ceil(position - 1e-6) - 1, above + 1)

    def _cumulative(self) -> list[float]:
        """Item i is the weight of the bins before bin i."""
        if self._below is None:
            self._below = list(accumulate(self._weights, initial=0.0))
        return self._below


def _bin(num_tokens: float) -> int:
    return min(max(bisect_right(EDGES, num_tokens) - 1, 0), len(EDGES) - 2)
