"""What one step computes and what comes back: plain arrays, no requests, no tensors.

Shapes: T tokens of the step, B sequences, S rows whose next token is sampled.
A sequence's new tokens are rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] of the packed
batch; there is no padding between sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """Sampling parameters of the S sampled rows; meanings as in baton.sampling.

    temperature: [S] float32, 0 is greedy.  top_k: [S] int64, 0 keeps all.
    top_p, min_p: [S] float32.  seed: [S] uint64.
    position: [S] int64, index in its sequence of the token to be sampled.
    sample_index: [S] int64.  want_logprobs: [S] bool.
    """

    temperature: Float32Array
    top_k: Int64Array
    top_p: Float32Array
    min_p: Float32Array
    seed: UInt64Array
    position: Int64Array
    sample_index: Int64Array
    want_logprobs: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step of the model.

    step_id: rises by one per step.
    token_ids, positions, slot_mapping: [T] int64; a slot is block_id * block_size + offset.
    cu_seqlens_q: [B + 1] int32, running sum of new tokens per sequence.
    seq_lens: [B] int32, tokens of context including the new ones.
    block_tables: [B, M] int32; entries beyond a sequence's blocks are 0 and mean nothing.
    logits_rows: [S] int64, rows of the packed batch whose logits are needed.
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

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step yields, in the order of logits_rows.

    token_ids: [S] int64, the sampled tokens; meaningless where finite is False.
    logprobs: [S] float32, log-probability of the sampled token under the unfiltered
        distribution; 0 where it was not wanted.
    finite: [S] bool, whether all logits of the row were finite.
    """

    step_id: int
    token_ids: Int64Array
    logprobs: Float32Array
    finite: BoolArray
