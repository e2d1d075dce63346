"""Log-probabilities of tokens under the distribution that the model gives, before any edit.

Owns their rules: fp32; the likeliest tokens in order, of equally likely ones the lowest id first;
and every number finite, because JSON knows no infinity: LOGPROB_FLOOR stands for what fp32 cannot
hold. Knows no parameters but counts.

Shape suffixes: N rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import torch

from engine.batch import BoolArray, Float32Array, Scores, TopTokens

LOGPROB_FLOOR = torch.finfo(torch.float32).min
"""The least log-probability that is ever reported: the smallest finite fp32 number, about -3.4e38."""


class RowLogprobs:
    """The log-probabilities of N rows of logits, [N, V] fp32; does not copy them."""

    def __init__(self, logits_NV: torch.Tensor) -> None:
        self._logits_NV = logits_NV
        self._best_N1 = logits_NV.amax(dim=-1, keepdim=True)
        # On a CPU log_softmax takes half the time of logsumexp.
        self._best_logprob_N1 = logits_NV.log_softmax(dim=-1).amax(dim=-1, keepdim=True)

    def of(self, token_ids_N: torch.Tensor) -> Float32Array:
        """[N] log-probability of one token per row."""
        return self._of(token_ids_N[:, None])[:, 0]

    def top(self, count: int) -> TopTokens:
        """The `count` likeliest tokens of each row, or all if the vocabulary is smaller."""
        token_ids_NK = likeliest(self._logits_NV, min(count, self._logits_NV.shape[1]))
        return TopTokens(token_ids=token_ids_NK.cpu().numpy(), logprobs=self._of(token_ids_NK))

    def _of(self, token_ids_NK: torch.Tensor) -> Float32Array:
        logprobs_NK = self._logits_NV.gather(1, token_ids_NK) - self._best_N1 + self._best_logprob_N1
        array: Float32Array = logprobs_NK.clamp(min=LOGPROB_FLOOR).cpu().numpy()
        return array


def likeliest(logits_NV: torch.Tensor, count: int) -> torch.Tensor:
    """[N, count] int64 ids of the largest logits, largest first, of equal ones the lowest id first."""
    if count == 0 or len(logits_NV) == 0:
        return torch.zeros(len(logits_NV), count, dtype=torch.int64, device=logits_NV.device)
    values_NK, ids_NK = logits_NV.topk(count, dim=-1)
    least_N1 = values_NK[:, -1:]
    # topk takes any of several tokens that are tied for its last places.
    for row in ((logits_NV >= least_N1).sum(dim=-1) > count).nonzero()[:, 0].tolist():
        above = (logits_NV[row] > least_N1[row]).nonzero()[:, 0]
        tied = (logits_NV[row] == least_N1[row]).nonzero()[:, 0]
        ids_NK[row] = torch.cat([above, tied])[:count]
    ids_NK = ids_NK.sort(dim=-1).values
    order_NK = logits_NV.gather(1, ids_NK).sort(dim=-1, descending=True, stable=True).indices
    return ids_NK.gather(1, order_NK)


def finite_rows(logits_NV: torch.Tensor) -> BoolArray:
    """[N] bool: whether all logits of a row are finite."""
    # Two reductions: torch's aminmax takes twenty times as long as both.
    finite_N = logits_NV.amin(dim=-1).isfinite() & logits_NV.amax(dim=-1).isfinite()
    array: BoolArray = finite_N.cpu().numpy()
    return array


def score(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top: int) -> Scores:
    """The log-probability of a given token per row, and of the likeliest; meaningless where not finite."""
    logprobs = RowLogprobs(logits_NV)
    return Scores(logprobs=logprobs.of(token_ids_N), finite=finite_rows(logits_NV), top=logprobs.top(num_top))
