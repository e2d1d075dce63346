"""Chooses the next token of each row from its logits.

A function of logits and parameters alone: no state, no generator. The order is that of
baton.sampling: temperature, top_k, top_p, min_p, then the likeliest token after adding
Gumbel numbers (engine/philox.py), which is a draw from the softmax of what survives.

Every filter is a threshold on the scaled logits, so a row's filters are one number. Tokens
tied with the last survivor survive too: no order of sorting can change the set.

Shape suffixes: S rows, R rows that draw, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel, gumbel_of_all

if TYPE_CHECKING:
    from engine.batch import BoolArray, Float32Array, Int64Array, SamplingArrays, UInt64Array

# top_p rarely keeps more tokens than this; a row that does is sorted whole.
_CANDIDATES = 1024
# A row that keeps more than one token in this many is drawn with the numbers of the whole vocabulary,
# which cost a quarter per token.
_DENSE = 4


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids [S] int64, logprobs [S] float32 (0 where not wanted), finite [S] bool."""

    token_ids: Int64Array
    logprobs: Float32Array
    finite: BoolArray


def sample(logits_SV: torch.Tensor, params: SamplingArrays) -> Sampled:
    """Samples every row. A row with a NaN or an infinity is marked; the others are unaffected."""
    # Two reductions: torch's aminmax takes twenty times as long as both.
    finite = (logits_SV.amin(dim=-1).isfinite() & logits_SV.amax(dim=-1).isfinite()).cpu().numpy()
    token_ids = logits_SV.argmax(dim=-1)
    drawing = np.flatnonzero((params.temperature > 0) & finite)
    if len(drawing):
        rows = torch.from_numpy(drawing).to(logits_SV.device)
        token_ids[rows] = _draw(logits_SV[rows], params, drawing)
    wanted = np.flatnonzero(params.want_logprobs & finite)
    logprobs = np.zeros(len(finite), np.float32)
    if len(wanted):
        rows = torch.from_numpy(wanted).to(logits_SV.device)
        all_logprobs = torch.log_softmax(logits_SV[rows], dim=-1)
        logprobs[wanted] = all_logprobs.gather(1, token_ids[rows, None])[:, 0].cpu().numpy()
    return Sampled(token_ids.cpu().numpy(), logprobs, finite)


def survivors(
    scaled_RV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[R] least scaled logit that survives the three filters; top_k int64, 0 keeps all."""
    threshold_R = torch.full_like(top_p, -torch.inf)
    if bool((top_k > 0).any()):
        threshold_R = _top_k_threshold(scaled_RV, top_k)
    if bool((top_p < 1).any()):
        threshold_R = torch.maximum(threshold_R, _top_p_threshold(scaled_RV, threshold_R, top_p))
    # p >= min_p * p_max in terms of logits; log(0) keeps all.
    return torch.maximum(threshold_R, scaled_RV.amax(dim=-1) + min_p.log())


def _draw(logits_RV: torch.Tensor, params: SamplingArrays, rows: Int64Array) -> torch.Tensor:
    device = logits_RV.device

    def column(values: Int64Array | Float32Array) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device)

    # Relative to the likeliest token, so that no temperature can overflow.
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)).div_(column(params.temperature)[:, None])
    threshold_R = survivors(scaled_RV, column(params.top_k), column(params.top_p), column(params.min_p))
    # Exact, not an approximation: below this no Gumbel number can make up for the likeliest token.
    kept_RV = scaled_RV >= threshold_R.clamp(min=GUMBEL_MIN - GUMBEL_MAX)[:, None]
    keys = _Keys.of(params, rows)
    is_dense_R = (kept_RV.sum(dim=-1) > kept_RV.shape[1] // _DENSE).cpu().numpy()
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)
    for row in np.flatnonzero(is_dense_R).tolist():
        token_ids[row] = _draw_dense(scaled_RV[row], kept_RV[row], keys, row)
    sparse = np.flatnonzero(~is_dense_R)
    if len(sparse):
        index = torch.from_numpy(sparse).to(device)
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
        return torch.from_numpy(np.stack([low, high, self.position, self.sample_index])).to(device)


def _top_k_threshold(scaled_RV: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    size = scaled_RV.shape[-1]
    k_R = torch.where(top_k > 0, top_k, size).clamp(max=size)
    limited = k_R < size
    if not bool(limited.any()):
        return torch.full(k_R.shape, -torch.inf, device=k_R.device)
    best = scaled_RV.topk(int(k_R[limited].max()), dim=-1).values
    at_k = best.gather(1, (k_R.clamp(max=best.shape[1]) - 1)[:, None])[:, 0]
    return torch.where(limited, at_k, -torch.inf)


def _top_p_threshold(scaled_RV: torch.Tensor, threshold_R: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Least logit of the smallest set whose share of what passed threshold_R reaches top_p."""
    passed_RV = scaled_RV.masked_fill(scaled_RV < threshold_R[:, None], -torch.inf)
    total_R1 = passed_RV.logsumexp(dim=-1, keepdim=True)
    size = passed_RV.shape[-1]
    best = passed_RV.topk(min(_CANDIDATES, size), dim=-1).values
    if bool(((best - total_R1).exp().sum(dim=-1) < top_p).any()):
        best = passed_RV.sort(dim=-1, descending=True).values
    probs = (best - total_R1).exp()
    # A token is kept while those before it have not reached top_p yet; the first always is.
    before = probs.cumsum(dim=-1) - probs
    num_kept = (before < top_p[:, None]).sum(dim=-1).clamp(min=1)
    at_edge = best.gather(1, (num_kept - 1)[:, None])[:, 0]
    return torch.where(top_p < 1, at_edge, -torch.inf)
