"""Which tokens survive top_k, top_p and min_p.

Every filter cuts the same ordering, likeliest first and of equally likely tokens the lowest id
first, so that what survives is a beginning of it: a threshold on the scaled logits and a number of
tokens. No order of sorting and no batch can change the set.

Shape suffixes: R rows, V vocabulary, C candidates, likeliest first.
"""

from __future__ import annotations

import torch

from engine.philox import GUMBEL_MAX, GUMBEL_MIN

# top_p rarely keeps more tokens than this; a row that does is sorted whole.
_CANDIDATES = 1024


def survivors(
    scaled_RV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the three filters leave, in this order, each of what the one before left.

    scaled_RV: logits over temperature, not above 0, at least one of each row finite.
    top_k: [R] int64, 0 keeps all.  top_p, min_p: [R] float32.
    Returns [R, V] bool, without tokens so unlikely that no Gumbel number can make them win, and
    [R] int64, how many they are.
    """
    threshold_R = torch.full_like(top_p, -torch.inf)
    limit_R = torch.full_like(top_k, scaled_RV.shape[1])
    if bool((top_k > 0).any()):
        threshold_R, limit_R = _top_k(scaled_RV, top_k)
    if bool((top_p < 1).any()):
        passed_RV = scaled_RV
        if bool((top_k > 0).any()):
            kept_RV, _ = _cut(scaled_RV, threshold_R, limit_R)
            passed_RV = scaled_RV.masked_fill(~kept_RV, -torch.inf)
        nucleus_R, num_nucleus_R = _top_p(passed_RV, top_p)
        threshold_R = torch.maximum(threshold_R, nucleus_R)
        limit_R = torch.minimum(limit_R, num_nucleus_R)
    best_R = scaled_RV.amax(dim=-1)
    # p >= min_p * p_max in terms of logits; log(0) keeps all.
    threshold_R = torch.maximum(threshold_R, best_R + min_p.log())
    return _cut(scaled_RV, torch.maximum(threshold_R, best_R + (GUMBEL_MIN - GUMBEL_MAX)), limit_R)


def _cut(
    scaled_RV: torch.Tensor, threshold_R: torch.Tensor, limit_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first limit_R tokens of the ordering, as far as they reach threshold_R; and their number."""
    kept_RV = scaled_RV >= threshold_R[:, None]
    num_kept_R = kept_RV.sum(dim=-1)
    # Only tokens tied with the last survivor can be too many; of these the lowest ids stay.
    over = (num_kept_R > limit_R).nonzero()[:, 0]
    if len(over):
        tied_RV = scaled_RV[over] == threshold_R[over, None]
        num_tied_R = limit_R[over] - (num_kept_R[over] - tied_RV.sum(dim=-1))
        kept_RV[over] &= ~tied_RV | (tied_RV.cumsum(dim=-1) <= num_tied_R[:, None])
    return kept_RV, torch.minimum(num_kept_R, limit_R)


def _top_k(scaled_RV: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] logit of the k-th token, -inf where all are kept; [R] how many are kept."""
    size = scaled_RV.shape[-1]
    k_R = torch.where(top_k > 0, top_k, size).clamp(max=size)
    limited_R = k_R < size
    if not bool(limited_R.any()):
        return torch.full(k_R.shape, -torch.inf, device=k_R.device), k_R
    best_RC = scaled_RV.topk(int(k_R[limited_R].max()), dim=-1).values
    at_k_R = best_RC.gather(1, (k_R.clamp(max=best_RC.shape[1]) - 1)[:, None])[:, 0]
    return torch.where(limited_R, at_k_R, -torch.inf), k_R


def _top_p(passed_RV: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest beginning whose share reaches top_p: [R] its least logit, -inf for all; [R] its size."""
    # fp64 sums, because the probabilities at the edge can be smaller than the rounding of an fp32 sum.
    total_R1 = passed_RV.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    size = passed_RV.shape[-1]
    best_RC = passed_RV.topk(min(_CANDIDATES, size), dim=-1).values
    at_edge_R, num_kept_R = _nucleus(best_RC, total_R1, top_p)
    reached_R = best_RC.exp().sum(dim=-1, dtype=torch.float64) / total_R1[:, 0] >= top_p
    flat = ((top_p < 1) & ~reached_R).nonzero()[:, 0]
    if len(flat):
        sorted_RC = passed_RV[flat].sort(dim=-1, descending=True).values
        at_edge_R[flat], num_kept_R[flat] = _nucleus(sorted_RC, total_R1[flat], top_p[flat])
    return torch.where(top_p < 1, at_edge_R, -torch.inf), torch.where(top_p < 1, num_kept_R, size)


def _nucleus(
    best_RC: torch.Tensor, total_R1: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    probs_RC = best_RC.exp().double() / total_R1
    # A token is kept while those before it have not reached top_p yet; the first always is.
    before_RC = probs_RC.cumsum(dim=-1) - probs_RC
    num_kept_R = (before_RC < top_p[:, None]).sum(dim=-1).clamp(min=1)
    return best_RC.gather(1, (num_kept_R - 1)[:, None])[:, 0], num_kept_R
