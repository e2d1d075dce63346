"""Causal attention of one prompt chunk as plain matrix products, for CPUs.

    out = softmax(scale * q k^T + mask) v

torch's fused CPU attention reaches a sixth to a third of the rate of matrix products;
block by block of queries, against only the keys such a block may see, the same work runs
at nearly full rate. The products' sums and the softmax are fp32 inside the operators; the scores
between them have the type of the queries, or are fp32 too.

Shape suffixes: K kv heads, G query heads per kv head, n new tokens, C context, h head_dim;
q rows of one block, S keys that some of its rows see.
"""

from __future__ import annotations

import torch

# Small blocks waste little work above the diagonal; large ones have better products.
_MAX_ROWS = 128
# Scores of one block stay within a few megabytes, whatever the context.
_MAX_SCORES = 1 << 22


def blocked_attention(
    q_KGnh: torch.Tensor,
    k_KCh: torch.Tensor,
    v_KCh: torch.Tensor,
    *,
    window: int = 0,
    scale: float,
    wide_scores: bool = False,
) -> torch.Tensor:
    """Attention of the last n of C positions; returns [K, G, n, h]. All strides are allowed.

    window: how many keys a query sees, its own among them; 0: all up to its own.
    wide_scores: they are fp32, whatever the type of q.
    """
    num_kv_heads, group, num_new, _ = q_KGnh.shape
    before = k_KCh.shape[1] - num_new
    heads, rows = size_of_block(num_kv_heads, group, k_KCh.shape[1], window)
    score_dtype = torch.float32 if wide_scores else q_KGnh.dtype
    v_KCh = _without_gaps(v_KCh)
    mask = _CornerMask(min(rows, num_new), window, score_dtype, q_KGnh.device)
    out_KGnh = torch.empty(q_KGnh.shape, dtype=q_KGnh.dtype, device=q_KGnh.device)
    for head in range(0, num_kv_heads, heads):
        part = slice(head, head + heads)
        # Once for all blocks of these heads, and never for all heads where the context is long.
        k_part_KCh = _without_gaps(k_KCh[part].to(score_dtype))
        for start in range(0, num_new, rows):
            end = min(start + rows, num_new)
            keys = slice(mask.first_key(before + start), before + end)
            out_KGnh[part, :, start:end] = _attend_block(
                q_KGnh[part, :, start:end], k_part_KCh[:, keys], v_KCh[part, keys], mask, scale
            )
    return out_KGnh


def size_of_block(num_kv_heads: int, group: int, context: int, window: int = 0) -> tuple[int, int]:
    """How many kv heads, and how many query positions, share a product.

    A kv head has a product of its own anyway: where the context is long, fewer of them leave room
    for more rows.
    """
    keys = min(context, window + _MAX_ROWS) if window else context
    rows = max(1, min(_MAX_ROWS, _MAX_SCORES // (group * keys)))
    return max(1, min(num_kv_heads, _MAX_SCORES // (group * keys * rows))), rows


def _attend_block(
    q_KGqh: torch.Tensor, k_KSh: torch.Tensor, v_KSh: torch.Tensor, mask: _CornerMask, scale: float
) -> torch.Tensor:
    num_kv_heads, group, rows, head_dim = q_KGqh.shape
    q_Kqh = q_KGqh.reshape(num_kv_heads, -1, head_dim).to(k_KSh.dtype)
    scores_KqS = scaled_product(q_Kqh, k_KSh.transpose(1, 2), scale)
    mask.hide(scores_KqS.view(num_kv_heads, group, rows, -1))
    return torch.bmm(torch.softmax(scores_KqS, dim=-1).to(v_KSh.dtype), v_KSh).view(q_KGqh.shape)


class _CornerMask:
    """Hides what single rows of a block must not see; every key of a block is seen by some row.

    These are two corners: above the diagonal of the last keys and, with a window, below that of
    the first ones.
    """

    def __init__(self, rows: int, window: int, dtype: torch.dtype, device: torch.device) -> None:
        hidden = torch.full((rows, rows), -torch.inf, dtype=dtype, device=device)
        self._window = window
        self._later = hidden.triu(diagonal=1)
        self._earlier = hidden.tril(diagonal=-1) if window else None

    def first_key(self, position: int) -> int:
        """The first position that a query there sees."""
        return max(0, position - self._window + 1) if self._window else 0

    def hide(self, scores_KGqS: torch.Tensor) -> None:
        """In place. The last S keys up to the last row's own, from the first that the first row sees."""
        rows, keys = scores_KGqS.shape[2:]
        scores_KGqS[..., keys - rows :].add_(self._later[:rows, :rows])
        if self._earlier is not None:
            # Near the beginning of the sequence several rows see the first key.
            whole = min(rows, self._window - 1 - (keys - rows))
            corner = rows - whole
            scores_KGqS[..., whole:, :corner].add_(self._earlier[:corner, :corner])


def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * a @ b for batches of matrices."""
    # With beta 0 the first argument is ignored; alpha scales the fp32 sums before they are rounded.
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)


def _without_gaps(x_KCh: torch.Tensor) -> torch.Tensor:
    # Every product reads keys and values again: one copy pays, unless each head's lie together already.
    dense = x_KCh.stride()[1:] == (x_KCh.shape[2], 1)
    return x_KCh if dense else x_KCh.contiguous()
