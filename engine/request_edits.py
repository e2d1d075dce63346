"""What the parameters of requests do to logits, as arrays: per request once, per step what changed.

Owns the translation from baton.sampling to engine.batch.LogitEdits. Knows no tensor;
engine/logits.py applies the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.batch import Biases, Float32Array, Int64Array, LogitEdits, Penalties, RowTokens
from engine.token_counts import TokenCounts

if TYPE_CHECKING:
    from baton.sampling import SamplingParams
    from engine.request import Request


class RequestEdits:
    """The edits of one request that do not depend on its tokens, and the counts of those that do."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._params = params
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self.bias_values = np.array([value for _, value in params.logit_bias], np.float32)
        self.allowed_ids = np.array(params.allowed_token_ids, np.int64)
        with_prompt = params.repetition_penalty != 1
        self.counts = (
            TokenCounts(num_prompt_tokens, with_prompt=with_prompt) if params.has_penalties else None
        )

    @classmethod
    def of(cls, params: SamplingParams, num_prompt_tokens: int) -> RequestEdits | None:
        """None if the parameters edit nothing."""
        edits = params.has_penalties or params.logit_bias or params.allowed_token_ids or params.min_tokens
        return cls(params, num_prompt_tokens) if edits else None

    def banned_ids(self, num_output_tokens: int, eos_token_ids: Collection[int]) -> Int64Array:
        """Ids that would end the answer before it has min_tokens."""
        params = self._params
        if num_output_tokens >= params.min_tokens:
            return np.zeros(0, np.int64)
        # A grammar holds its own end back (engine/grammar.py): only it knows whether anything else may come.
        keeps_eos = params.ignore_eos or params.grammar is not None
        ends = {*params.stop_token_ids, *(() if keeps_eos else eos_token_ids)}
        return np.array(sorted(ends), np.int64)


def gather_edits(requests: Sequence[Request], eos_token_ids: Collection[int]) -> LogitEdits | None:
    """The edits of a step's sampled rows, one row per request; None if no request has any."""
    if not any(r.edits is not None or r.mask is not None for r in requests):
        return None
    edited = [(row, r, r.edits) for row, r in enumerate(requests) if r.edits is not None]
    masks = tuple((row, r.mask) for row, r in enumerate(requests) if r.mask is not None)

    def ragged(ids_of: Callable[[Request, RequestEdits], Int64Array]) -> RowTokens | None:
        return _row_tokens([(row, ids_of(request, edits)) for row, request, edits in edited])

    return LogitEdits(
        penalties=_penalties(requests),
        biases=_biases(edited),
        banned=ragged(lambda request, edits: edits.banned_ids(request.num_output_tokens, eos_token_ids)),
        allowed=ragged(lambda _, edits: edits.allowed_ids),
        masks=masks,
    )


def _row_tokens(parts: Sequence[tuple[int, Int64Array]]) -> RowTokens | None:
    parts = [(row, ids) for row, ids in parts if len(ids)]
    if not parts:
        return None
    rows = np.repeat([row for row, _ in parts], [len(ids) for _, ids in parts])
    return RowTokens(rows=rows, token_ids=np.concatenate([ids for _, ids in parts]))


def _biases(edited: Sequence[tuple[int, Request, RequestEdits]]) -> Biases | None:
    at = _row_tokens([(row, edits.bias_ids) for row, _, edits in edited])
    if at is None:
        return None
    return Biases(at=at, values=np.concatenate([edits.bias_values for _, _, edits in edited]))


def _penalties(requests: Sequence[Request]) -> Penalties | None:
    ids: list[tuple[int, Int64Array]] = []
    counts: list[Float32Array] = []
    for row, request in enumerate(requests):
        if request.edits is not None and request.edits.counts is not None:
            row_ids, row_counts = request.edits.counts.catch_up(request.token_ids)
            ids.append((row, row_ids))
            counts.append(row_counts)
    at = _row_tokens(ids)
    if at is None:
        return None
    params = [request.params for request in requests]
    return Penalties(
        at=at,
        counts=np.concatenate(counts),
        repetition=np.array([p.repetition_penalty for p in params], np.float32),
        presence=np.array([p.presence_penalty for p in params], np.float32),
        frequency=np.array([p.frequency_penalty for p in params], np.float32),
    )
