"""Chooses the next token of each row from its logits: docs/sampling.md, applied.

    finite? -> raw log-probabilities -> edits (engine/logits.py) -> temperature
    -> top_k, top_p, min_p (engine/filters.py) -> Gumbel-argmax (engine/philox.py)

A function of logits and parameters alone: no state, no generator. Adding Gumbel numbers to the
scaled logits and taking the largest sum is a draw from the softmax of what survives.

Shape suffixes: S rows, R rows that draw, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.errors import BatonError
from engine.batch import TopTokens
from engine.filters import survivors
from engine.likeliest import likeliest
from engine.logits import edit_
from engine.logprobs import RowLogprobs, finite_rows
from engine.philox import gumbel, gumbel_of_all
from engine.upload import uploaded

if TYPE_CHECKING:
    from engine.batch import BoolArray, Float32Array, Int64Array, SamplingArrays, UInt64Array

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: only exact ties could be drawn, and those go to the lowest id."""

# A row that keeps more than one token in this many is drawn with the numbers of the whole vocabulary,
# which cost a quarter per token.
_DENSE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Fields as those of engine.batch.StepOutput."""

    token_ids: Int64Array
    logprobs: Float32Array
    finite: BoolArray
    blocked: frozenset[int]
    mask_errors: dict[int, BatonError]
    top: TopTokens | None


def sample(logits_SV: torch.Tensor, params: SamplingArrays) -> Sampled:
    """Samples every row; overwrites logits_SV if rows have edits.

    A row with a NaN or an infinity is marked, and one that edits leave no token; the others are
    unaffected.
    """
    finite = finite_rows(logits_SV)
    wanted = np.flatnonzero(params.want_logprobs & finite)
    raw = _raw_logprobs(logits_SV, wanted, params)
    possible, mask_errors = finite, dict[int, BatonError]()
    if params.edits is not None:
        mask_errors = edit_(logits_SV, params.edits)
        possible = finite & (logits_SV.amax(dim=-1) > -torch.inf).cpu().numpy()
    token_ids = likeliest(logits_SV)
    drawing = np.flatnonzero((params.temperature >= GREEDY_BELOW) & possible)
    if len(drawing):
        rows = _index(drawing, logits_SV)
        token_ids[rows] = _draw(logits_SV[rows], params, drawing)
    logprobs = np.zeros(len(finite), np.float32)
    if raw is not None:
        logprobs[wanted] = raw.of(token_ids[_index(wanted, logits_SV)])
    return Sampled(
        token_ids=token_ids.cpu().numpy(),
        logprobs=logprobs,
        finite=finite,
        blocked=frozenset(np.flatnonzero(finite & ~possible).tolist()),
        mask_errors=mask_errors,
        top=_top_of_all(raw, wanted, params.num_top_logprobs, len(finite)),
    )


def _raw_logprobs(logits_SV: torch.Tensor, wanted: Int64Array, params: SamplingArrays) -> RowLogprobs | None:
    """Of the wanted rows, from logits that the edits will not touch."""
    if len(wanted) == 0:
        return None
    if params.edits is None and len(wanted) == len(logits_SV):
        return RowLogprobs(logits_SV)
    return RowLogprobs(logits_SV[_index(wanted, logits_SV)])


def _top_of_all(raw: RowLogprobs | None, wanted: Int64Array, count: int, num_rows: int) -> TopTokens | None:
    if raw is None or not count:
        return None
    top = raw.top(count)
    count = top.token_ids.shape[1]
    spread = TopTokens(
        token_ids=np.zeros((num_rows, count), np.int64), logprobs=np.zeros((num_rows, count), np.float32)
    )
    spread.token_ids[wanted], spread.logprobs[wanted] = top.token_ids, top.logprobs
    return spread


def _index(rows: Int64Array, logits_SV: torch.Tensor) -> torch.Tensor:
    return uploaded(rows, logits_SV.device)


def _draw(logits_RV: torch.Tensor, params: SamplingArrays, rows: Int64Array) -> torch.Tensor:
    device = logits_RV.device

    def column(values: Int64Array | Float32Array) -> torch.Tensor:
        return uploaded(values[rows], device)

    # Relative to the likeliest token, so that no temperature can overflow.
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)).div_(column(params.temperature)[:, None])
    kept_RV, num_kept_R = survivors(
        scaled_RV, column(params.top_k), column(params.top_p), column(params.min_p)
    )
    keys = _Keys.of(params, rows)
    is_dense_R = (num_kept_R > kept_RV.shape[1] // _DENSE).cpu().numpy()
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)
    for row in np.flatnonzero(is_dense_R).tolist():
        token_ids[row] = _draw_dense(scaled_RV[row], kept_RV[row], keys, row)
    sparse = np.flatnonzero(~is_dense_R)
    if len(sparse):
        index = uploaded(sparse, device)
        token_ids[index] = _draw_sparse(scaled_RV[index], kept_RV[index], keys.select(sparse))
    return token_ids


def _draw_dense(scaled_V: torch.Tensor, kept_V: torch.Tensor, keys: _Keys, row: int) -> torch.Tensor:
    noise_V = gumbel_of_all(
        len(scaled_V),
        seed=int(keys.seed[row]),
        position=int(keys.position[row]),
        sample_index=int(keys.sample_index[row]),
        device=scaled_V.device,
    )
    return noise_V.add_(scaled_V).masked_fill_(~kept_V, -torch.inf).argmax()


def _draw_sparse(scaled_RV: torch.Tensor, kept_RV: torch.Tensor, keys: _Keys) -> torch.Tensor:
    rows, token_ids = kept_RV.nonzero(as_tuple=True)
    seed_low, seed_high, position, sample_index = keys.words(scaled_RV.device)[:, rows]
    noise = gumbel(
        token_ids, seed_low=seed_low, seed_high=seed_high, position=position, sample_index=sample_index
    )
    scores = scaled_RV[rows, token_ids] + noise
    best_R = torch.full_like(scaled_RV[:, 0], -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    # Of tied winners, the lowest id.
    candidates = torch.where(scores == best_R[rows], token_ids, scaled_RV.shape[1])
    return torch.full_like(best_R, scaled_RV.shape[1], dtype=torch.int64).scatter_reduce_(
        0, rows, candidates, "amin"
    )


@dataclass(frozen=True, slots=True)
class _Keys:
    """What keys the random numbers of R rows: arrays of [R]."""

    seed: UInt64Array
    position: Int64Array
    sample_index: Int64Array

    @classmethod
    def of(cls, params: SamplingArrays, rows: Int64Array) -> _Keys:
        return cls(params.seed[rows], params.position[rows], params.sample_index[rows])

    def select(self, rows: Int64Array) -> _Keys:
        return _Keys(self.seed[rows], self.position[rows], self.sample_index[rows])

    def words(self, device: torch.device) -> torch.Tensor:
        """[4, R] int64: low and high half of the seed, position, sample_index."""
        low = (self.seed & np.uint64(0xFFFFFFFF)).astype(np.int64)
        high = (self.seed >> np.uint64(32)).astype(np.int64)
        return uploaded(np.stack([low, high, self.position, self.sample_index]), device)
