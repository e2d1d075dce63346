"""What one step computes and what comes back: plain arrays, no requests, no tensors.

Shapes: T tokens of the step, B sequences, S rows whose next token is sampled, P rows that
score a prompt's next token, K likeliest tokens, E entries of a ragged array, V vocabulary.
A sequence's new tokens are rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] of the packed
batch; there is no padding between sequences.

What few requests ask for is None unless one does: a plain step pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from baton.errors import BatonError
    from engine.token_mask import TokenMask

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTokens:
    """Tokens of some of the S rows: a ragged array, flattened. rows, token_ids: [E] int64."""

    rows: Int64Array
    token_ids: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Penalties:
    """Tokens that rows have seen, each at most once per row, and what that costs them.

    counts: [E] float32, how often the answer has the token.
    repetition, presence, frequency: [S] float32; meanings as in baton.sampling.
    """

    at: RowTokens
    counts: Float32Array
    repetition: Float32Array
    presence: Float32Array
    frequency: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Biases:
    """Numbers to add to logits; values: [E] float32."""

    at: RowTokens
    values: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitEdits:
    """Changes to logits before temperature and filters, in the order in which they apply.

    banned: tokens that may not be sampled yet.  allowed: the only tokens of their rows.
    masks: (row, mask), at most one per row; perhaps still being computed.
    """

    penalties: Penalties | None = None
    biases: Biases | None = None
    banned: RowTokens | None = None
    allowed: RowTokens | None = None
    masks: tuple[tuple[int, TokenMask], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """Sampling parameters of the S sampled rows; meanings as in baton.sampling.

    temperature: [S] float32, 0 is greedy.  top_k: [S] int64, 0 keeps all.
    top_p, min_p: [S] float32.  seed: [S] uint64.
    position: [S] int64, index in its sequence of the token to be sampled.
    sample_index: [S] int64.  want_logprobs: [S] bool.
    num_top_logprobs: K, the most that any row wants.
    """

    temperature: Float32Array
    top_k: Int64Array
    top_p: Float32Array
    min_p: Float32Array
    seed: UInt64Array
    position: Int64Array
    sample_index: Int64Array
    want_logprobs: BoolArray
    num_top_logprobs: int = 0
    edits: LogitEdits | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRows:
    """Rows of the packed batch whose logits give the log-probability of the prompt token that follows.

    rows, token_ids: [P] int64, sequence by sequence.
    num_top_logprobs: K, the most likeliest tokens that any of them wants.
    """

    rows: Int64Array
    token_ids: Int64Array
    num_top_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step of the model.

    step_id: rises by one per step.
    token_ids, positions, slot_mapping: [T] int64; a slot is block_id * block_size + offset.
    cu_seqlens_q: [B + 1] int32, running sum of new tokens per sequence.
    seq_lens: [B] int32, tokens of context including the new ones.
    block_tables: [B, M] int32; entries beyond a sequence's blocks are 0 and mean nothing.
    logits_rows: [S] int64, rows of the packed batch whose next token is sampled.
    rope_steps: [T] int64, scale step of each token's rotary embedding; None where all are 0.
    """

    step_id: int
    token_ids: Int64Array
    positions: Int64Array
    slot_mapping: Int64Array
    cu_seqlens_q: Int32Array
    seq_lens: Int32Array
    block_tables: Int32Array
    logits_rows: Int64Array
    sampling: SamplingArrays
    scored: ScoredRows | None = None
    rope_steps: Int64Array | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The K likeliest tokens of N rows, likeliest first, of equally likely ones the lowest id first.

    token_ids: [N, K] int64.  logprobs: [N, K] float32, of the unedited distribution.
    """

    token_ids: Int64Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Log-probabilities of prompt tokens, in the order of ForwardBatch.scored.

    logprobs: [P] float32.  finite: [P] bool, whether all logits of the row were.  top: of [P, K].
    """

    logprobs: Float32Array
    finite: BoolArray
    top: TopTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step yields, in the order of logits_rows.

    token_ids: [S] int64, the sampled tokens; meaningless where finite is False and for blocked rows.
    logprobs: [S] float32, log-probability of the sampled token under the unedited, unfiltered
        distribution; 0 where it was not wanted.
    finite: [S] bool, whether all logits of the row were finite.
    blocked: rows whose edits leave no token to sample.
    mask_errors: what ends a row's request, because its mask could not be computed.
    top: of [S, K]; None if nobody wants it; meaningless where a row does not want logprobs.
    scores: of the batch's scored rows; None if it has none.
    nonfinite_at: of sequences with logits that are not finite, where these first appear; filled
        by a runner that was told to look.
    """

    step_id: int
    token_ids: Int64Array
    logprobs: Float32Array
    finite: BoolArray
    blocked: frozenset[int] = frozenset()
    mask_errors: Mapping[int, BatonError] = field(default_factory=dict)
    top: TopTokens | None = None
    scores: Scores | None = None
    nonfinite_at: Mapping[int, str] = field(default_factory=dict)
