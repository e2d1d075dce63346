"""How long an answer is going to be, from the answers seen lately.

A synchronous core. Answers are kept apart by the max_tokens that they were allowed, because who asks for few
gets few; classes are powers of two. Lengths include answers cut off at max_tokens: what is predicted is what
KV has to be kept for.
"""

from __future__ import annotations

from router.learning.decaying_histogram import DecayingHistogram

# Some 500 answers count, in each class and over all.
DECAY = 0.998
# Fewer than these in its class, and an answer is predicted like all others.
MIN_CLASS_WEIGHT = 8.0
# Less than half an answer that was longer than this one is now, and nothing is known.
MIN_WEIGHT = 0.5
MAX_CLASS = 24


class OutputLengths:
    """Quantiles of output lengths, in tokens.

    quantile: the share of answers that are not longer than expected.
    """

    def __init__(self, quantile: float = 0.9, *, decay: float = DECAY) -> None:
        self._quantile = quantile
        self._decay = decay
        self._all = DecayingHistogram(decay)
        self._classes: dict[int, DecayingHistogram] = {}

    def observe(self, max_tokens: int, num_output_tokens: int) -> None:
        """An answer that was allowed max_tokens had num_output_tokens; negative numbers are ignored."""
        if num_output_tokens < 0:
            return
        lengths = self._classes.setdefault(_class(max_tokens), DecayingHistogram(self._decay))
        lengths.add(num_output_tokens)
        self._all.add(num_output_tokens)

    def expected(self, max_tokens: int, num_so_far: int = 0) -> int:
        """The quantile of an answer's whole length, given that it is longer than num_so_far.

        From answers of its class, else from all, else max_tokens. At least num_so_far + 1, at most
        max_tokens.
        """
        own = self._classes.get(_class(max_tokens))
        for lengths, enough in ((own, MIN_CLASS_WEIGHT), (self._all, MIN_WEIGHT)):
            if lengths is not None and lengths.total - lengths.below(num_so_far + 1) >= enough:
                return min(lengths.quantile(self._quantile, above=num_so_far), max_tokens)
        return max_tokens


def _class(max_tokens: int) -> int:
    """0 for 1, 1 for 2, 2 for 3 and 4, 3 for 5 to 8, ..."""
    return min((max_tokens - 1).bit_length(), MAX_CLASS)
