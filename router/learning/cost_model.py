"""What prefill, transfer and decode steps will take at each worker, learned from what they took.

A synchronous core, without a clock: the workers measure, the model learns, and tells how far off it was.
Workers are incarnations. All times are milliseconds, all lengths tokens.

The formulas follow the number of operations, per worker:

    prefill   a + b n + c n (cached + n/2)                n tokens computed behind `cached` ones
    transfer  a + b n                                     per pair: the tail that no computing hides
    step      a + b decoding + c context + d prompt       context: tokens attended to by all decoding requests

A prefill of n tokens takes 2 P n operations in the linear layers (P parameters) and 4 L H h in the attention
of each of n tokens (L layers, H heads of size h) to each token before it: n cached + n^2/2 pairs. Decoding
reads the weights once a step (a), computes 2 P operations a request (b) and reads the cache of all of them
(c). Overheads are in a.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Literal, TypeVar

from router.learning.error_window import ErrorWindow
from router.learning.online_fit import OnlineFit

Kind = Literal["prefill", "transfer", "step"]
KINDS: Final[tuple[Kind, ...]] = ("prefill", "transfer", "step")

# Before anything was measured: a model of some 100 million parameters on two cores of a laptop, and a tail of
# one round trip. A few tokens take as long as reading the weights, or the first short prompts would make
# long ones look endless.
PREFILL_PRIOR: Final = (30.0, 1.0, 0.0)
TRANSFER_PRIOR: Final = (1.0, 0.001)
STEP_PRIOR: Final = (20.0, 1.5, 0.0015, 0.0)
# Where they are believed: (tokens, cached); tokens; (decoding, context, prompt).
_PREFILL_EXAMPLES: Final = ((128, 0), (512, 0), (2048, 0), (512, 2048))
_TRANSFER_EXAMPLES: Final = (64, 512, 4096)
_STEP_EXAMPLES: Final = ((1, 256, 0), (8, 1024, 0), (32, 16384, 0), (32, 4096, 0))
# A tail below 0.1 ms is as good as none. Errors of tails are relative to 1 ms at least: who waits does not
# notice less.
PREFILL_FLOOR_MS: Final = 0.001
TRANSFER_FLOOR_MS: Final = 0.1
STEP_FLOOR_MS: Final = 0.001
TRANSFER_ERROR_FLOOR_MS: Final = 1.0
# A measurement beyond a day is none.
LONGEST_MS: Final = 86_400_000.0
# Errors kept.
NUM_ERRORS: Final = 512
# The chunk whose cost per token stands for that of prompt tokens beside decoding requests while few were
# seen: it counts as two such steps, or next to nothing where no prefill was observed either.
_CHUNK: Final = 128
_PREFILL_HINT: Final = 2.0
_PRIOR_HINT: Final = 0.05

Pair = tuple[int, int]
Key = TypeVar("Key", bound=Hashable)


class CostModel:
    """Predictions in ms for prefill, transfer and decode steps, and their errors.

    A worker that was never observed is predicted like a typical one; before any observation, by the priors
    above. Measurements that cannot be (not finite, negative, 0 for a computation) are ignored.
    """

    def __init__(self) -> None:
        self._prefill = OnlineFit[int](
            PREFILL_PRIOR,
            [prefill_features(*example) for example in _PREFILL_EXAMPLES],
            floor=PREFILL_FLOOR_MS,
        )
        self._transfer = OnlineFit[Pair](
            TRANSFER_PRIOR,
            [transfer_features(example) for example in _TRANSFER_EXAMPLES],
            floor=TRANSFER_FLOOR_MS,
        )
        self._step = OnlineFit[int](
            STEP_PRIOR,
            [step_features(*example) for example in _STEP_EXAMPLES],
            floor=STEP_FLOOR_MS,
            hint=(3, self._prompt_token_ms),
        )
        # Whom to forget with a worker.
        self._pairs: dict[int, set[Pair]] = {}
        self._errors = {kind: ErrorWindow(NUM_ERRORS) for kind in KINDS}

    def prefill_ms(self, worker: int, num_tokens: int, num_cached_tokens: int) -> float:
        """Computing num_tokens behind num_cached_tokens that the worker holds, alone, without waiting."""
        return self._prefill.predict(worker, prefill_features(num_tokens, num_cached_tokens))

    def transfer_ms(self, source: int, target: int, num_tokens: int) -> float:
        """From the end of prefill at `source` to the commit at `target`, of a handoff of num_tokens."""
        return self._transfer.predict((source, target), transfer_features(num_tokens))

    def step_ms(
        self, worker: int, num_decoding: int, num_context_tokens: int, num_prompt_tokens: int = 0
    ) -> float:
        """One step of num_decoding requests with num_context_tokens in all, and prompt tokens beside them."""
        return self._step.predict(worker, step_features(num_decoding, num_context_tokens, num_prompt_tokens))

    def observe_prefill(
        self, worker: int, num_tokens: int, num_cached_tokens: int, compute_ms: float
    ) -> None:
        """A prefill took compute_ms of the worker's time."""
        if num_tokens > 0 and _can_be(compute_ms):
            features = prefill_features(num_tokens, num_cached_tokens)
            self._note("prefill", self._prefill.predict(worker, features), compute_ms)
            self._prefill.observe(worker, features, compute_ms)
            self._step.reconsider()

    def observe_transfer(self, source: int, target: int, num_tokens: int, tail_ms: float) -> None:
        """A handoff's commit came tail_ms after the end of its prefill; 0 if computing hid all of it."""
        if num_tokens > 0 and (tail_ms == 0 or _can_be(tail_ms)):
            features, pair = transfer_features(num_tokens), (source, target)
            for end in pair:
                self._pairs.setdefault(end, set()).add(pair)
            self._note("transfer", self._transfer.predict(pair, features), tail_ms)
            self._transfer.observe(pair, features, tail_ms)

    def observe_step(
        self,
        worker: int,
        num_decoding: int,
        num_context_tokens: int,
        num_prompt_tokens: int,
        duration_ms: float,
    ) -> None:
        """A step took duration_ms."""
        if num_decoding + num_prompt_tokens > 0 and _can_be(duration_ms):
            features = step_features(num_decoding, num_context_tokens, num_prompt_tokens)
            self._note("step", self._step.predict(worker, features), duration_ms)
            self._step.observe(worker, features, duration_ms)

    def error_p90(self, kind: Kind) -> float:
        """The 90th percentile of |predicted - measured| / measured of late; 0.0 before the first.

        Each was made before its measurement was learned.
        """
        return self._errors[kind].p90()

    def coefficients(self, kind: Kind, worker: int | Pair | None = None) -> tuple[float, ...]:
        """The coefficients a, b, ... of the formula of that kind, in ms per its feature.

        worker: for transfers the pair (source, target). None, or one never observed: a typical one.
        """
        if kind == "transfer":
            return self._transfer.coefficients(worker if isinstance(worker, tuple) else None)
        fit = self._prefill if kind == "prefill" else self._step
        return fit.coefficients(worker if isinstance(worker, int) else None)

    def forget(self, worker: int) -> None:
        """The worker is gone for good. What the others' priors learned from it stays."""
        self._prefill.forget(worker)
        self._step.forget(worker)
        for pair in self._transfer.members:
            if worker in pair:
                self._transfer.forget(pair)

    def _prompt_token_ms(self, worker: int | None) -> tuple[float, float]:
        """What one more prompt token costs where a chunk is computed (above 0), and what that counts."""
        coefficients = self._prefill.coefficients(worker)
        chunk, one = prefill_features(_CHUNK, 0), prefill_features(0, 0)
        whole = sum(c * (x - y) for c, x, y in zip(coefficients, chunk, one, strict=True))
        count = _PREFILL_HINT if self._prefill.num_seen else _PRIOR_HINT
        return max(whole, PREFILL_FLOOR_MS) / _CHUNK, count

    def _note(self, kind: Kind, predicted: float, measured: float) -> None:
        floor = TRANSFER_ERROR_FLOOR_MS if kind == "transfer" else PREFILL_FLOOR_MS
        self._errors[kind].add(predicted, measured, floor)


def prefill_features(num_tokens: int, num_cached_tokens: int) -> tuple[float, float, float]:
    """What the coefficients of "prefill" are multiplied with."""
    return 1.0, num_tokens, num_tokens * (num_cached_tokens + num_tokens / 2)


def transfer_features(num_tokens: int) -> tuple[float, float]:
    """What the coefficients of "transfer" are multiplied with."""
    return 1.0, num_tokens


def step_features(
    num_decoding: int, num_context_tokens: int, num_prompt_tokens: int
) -> tuple[float, float, float, float]:
    """What the coefficients of "step" are multiplied with."""
    return 1.0, num_decoding, num_context_tokens, num_prompt_tokens


def _can_be(measured_ms: float) -> bool:
    # False for NaN, too.
    return 0 < measured_ms <= LONGEST_MS
