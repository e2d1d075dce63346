"""How long things take in a replay: the formulas of the cost model with the coefficients of the log.

In a replay this is the truth, to the last digit. What a policy believes is its own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.learning.cost_model import prefill_features, step_features, transfer_features


class RecordedCosts:
    """Times in milliseconds; a worker without coefficients of its own takes the fleet's.

    coefficients: by (kind, worker's name), the fleet's under "".
    """

    def __init__(self, coefficients: Mapping[tuple[str, str], Sequence[float]]) -> None:
        self._coefficients = coefficients

    def chunk_ms(self, worker: str, num_tokens: int, num_before: int) -> float:
        """Computing a part of a prompt, num_tokens after num_before, without what each prompt costs once.

        The chunks of a prompt add up to what the whole costs: sum of k (p + k/2) over chunks of k tokens that
        begin at p is n (cached + n/2).
        """
        return _dot(self._of("prefill", worker), (0.0, *prefill_features(num_tokens, num_before)[1:]))

    def prompt_ms(self, worker: str) -> float:
        """What each prompt costs once."""
        return self._of("prefill", worker)[0]

    def transfer_ms(self, num_tokens: int) -> float:
        """The part of a transfer that nothing hides."""
        return _dot(self._of("transfer", ""), transfer_features(num_tokens)) if num_tokens else 0.0

    def step_ms(self, worker: str, num_decoding: int, num_context: int, num_prompt: int) -> float:
        """A step that decodes, with prompt tokens beside."""
        return _dot(self._of("step", worker), step_features(num_decoding, num_context, num_prompt))

    def _of(self, kind: str, worker: str) -> Sequence[float]:
        own = self._coefficients.get((kind, worker))
        return self._coefficients[kind, ""] if own is None else own


def _dot(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(coefficients, features, strict=True))
