"""Turns chosen requests into the arrays of one step.

The only place where requests become a ForwardBatch; engine/step_results.py is the way back. It
decides nothing: which request computes how many tokens is the scheduler's choice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.batch import ForwardBatch, Int32Array, Int64Array, SamplingArrays, ScoredRows
from engine.request_edits import gather_edits

if TYPE_CHECKING:
    from engine.request import Request

_NOTHING = range(0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """num_tokens pending tokens of one request, to be computed in one step.

    samples: the chunk reaches the request's last token, so that the next one is sampled.
    scored: indices of the prompt tokens whose log-probability the chunk yields: those that follow its own
        tokens, so that chunks yield each once, and the first token of a prompt has none.

    All is fixed when the chunk is made, because a request that is removed may change during the step.
    """

    request: Request
    num_tokens: int
    samples: bool
    scored: range = _NOTHING

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> Chunk:
        """The next num_tokens pending tokens of the request."""
        samples = num_tokens == request.num_pending_tokens
        if request.params.prompt_logprobs is None:
            return cls(request, num_tokens, samples)
        first = request.num_computed_tokens + 1
        scored = range(first, min(first + num_tokens, request.num_prompt_tokens))
        return cls(request, num_tokens, samples, scored)


def build_batch(
    step_id: int, chunks: Sequence[Chunk], block_size: int, eos_token_ids: Collection[int] = ()
) -> ForwardBatch:
    """Packs the chunks, in their order and without padding. Blocks must cover all their tokens.

    eos_token_ids: the model's own, which min_tokens holds back.
    """
    lengths = np.array([chunk.num_tokens for chunk in chunks], np.int64)
    starts = np.array([chunk.request.num_computed_tokens for chunk in chunks], np.int64)
    cu_seqlens_q = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    rows = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(lengths.sum()) - cu_seqlens_q[rows] + starts[rows]
    block_tables = _block_tables(chunks)
    sampled = [index for index, chunk in enumerate(chunks) if chunk.samples]
    return ForwardBatch(
        step_id=step_id,
        token_ids=_token_ids(chunks),
        positions=positions,
        slot_mapping=block_tables[rows, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=(starts + lengths).astype(np.int32),
        block_tables=block_tables,
        logits_rows=cu_seqlens_q[1:][sampled].astype(np.int64) - 1,
        sampling=_sampling([chunks[index].request for index in sampled], eos_token_ids),
        scored=_scored(chunks, cu_seqlens_q),
        rope_steps=_rope_steps(chunks, lengths),
    )


def _token_ids(chunks: Sequence[Chunk]) -> Int64Array:
    token_ids: list[int] = []
    for chunk in chunks:
        start = chunk.request.num_computed_tokens
        token_ids += chunk.request.token_ids[start : start + chunk.num_tokens]
    return np.array(token_ids, np.int64)


def _rope_steps(chunks: Sequence[Chunk], lengths: Int64Array) -> Int64Array | None:
    steps = [chunk.request.rope_step for chunk in chunks]
    return np.repeat(np.array(steps, np.int64), lengths) if any(steps) else None


def _block_tables(chunks: Sequence[Chunk]) -> Int32Array:
    width = max(len(chunk.request.block_ids) for chunk in chunks)
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.request.block_ids)] = chunk.request.block_ids
    return tables


def _scored(chunks: Sequence[Chunk], cu_seqlens_q: Int32Array) -> ScoredRows | None:
    scoring = [(int(row), chunk) for row, chunk in zip(cu_seqlens_q, chunks, strict=False) if chunk.scored]
    if not scoring:
        return None
    token_ids = [id_ for _, c in scoring for id_ in c.request.token_ids[c.scored.start : c.scored.stop]]
    return ScoredRows(
        rows=np.concatenate([row + np.arange(len(chunk.scored)) for row, chunk in scoring]),
        token_ids=np.array(token_ids, np.int64),
        num_top_logprobs=max(chunk.request.params.prompt_logprobs or 0 for _, chunk in scoring),
    )


def _sampling(requests: Sequence[Request], eos_token_ids: Collection[int]) -> SamplingArrays:
    params = [request.params for request in requests]
    return SamplingArrays(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.uint64),
        position=np.array([request.num_tokens for request in requests], np.int64),
        sample_index=np.array([request.sample_index for request in requests], np.int64),
        want_logprobs=np.array([p.logprobs for p in params], np.bool_),
        num_top_logprobs=max([p.top_logprobs for p in params], default=0),
        edits=gather_edits(requests, eos_token_ids),
    )
