"""Causal attention of one prompt chunk as plain matrix products, for CPUs.

    out = softmax(scale * q k^T + causal mask) v

torch's fused CPU attention reaches a sixth to a third of the rate of matrix products;
block by block of queries, against only the keys such a block may see, the same work runs
at nearly full rate. The products' sums and the softmax are fp32 inside the operators.

Shape suffixes: K kv heads, G query heads per kv head, n new tokens, C context, h head_dim;
q rows of one block.
"""

from __future__ import annotations

import torch

# Small blocks waste little work above the diagonal; large ones have better products.
_MAX_ROWS, _MIN_ROWS = 128, 16
# Scores of one block stay within a few megabytes, whatever the context.
_MAX_SCORES = 1 << 22


def blocked_attention(q_KGnh: torch.Tensor, k_KCh: torch.Tensor, v_KCh: torch.Tensor) -> torch.Tensor:
    """Attention of the last n of C positions; returns [K, G, n, h]. All strides are allowed."""
    num_kv_heads, group, num_new, head_dim = q_KGnh.shape
    context = k_KCh.shape[1]
    rows = rows_per_block(num_kv_heads * group, context)
    # Every product reads keys and values again: one copy without gaps pays.
    k_KCh, v_KCh = k_KCh.contiguous(), v_KCh.contiguous()
    corner = _causal_corner(min(rows, num_new), q_KGnh)
    out_KGnh = torch.empty(q_KGnh.shape, dtype=q_KGnh.dtype, device=q_KGnh.device)
    for start in range(0, num_new, rows):
        end = min(start + rows, num_new)
        seen = context - num_new + end
        q_Kqh = q_KGnh[:, :, start:end].reshape(num_kv_heads, -1, head_dim)
        scores_KqC = scaled_product(q_Kqh, k_KCh[:, :seen].transpose(1, 2), head_dim**-0.5)
        # Only the last end - start columns hold positions that some row must not see.
        by_head = scores_KqC.view(num_kv_heads, group, end - start, seen)
        by_head[..., seen - (end - start) :].add_(corner[: end - start, : end - start])
        weights_KqC = torch.softmax(scores_KqC, dim=-1)
        out_KGnh[:, :, start:end] = torch.bmm(weights_KqC, v_KCh[:, :seen]).view(
            num_kv_heads, group, end - start, head_dim
        )
    return out_KGnh


def rows_per_block(num_heads: int, context: int) -> int:
    """Query positions per block."""
    return max(_MIN_ROWS, min(_MAX_ROWS, _MAX_SCORES // (num_heads * context)))


def _causal_corner(size: int, like: torch.Tensor) -> torch.Tensor:
    blocked = torch.full((size, size), -torch.inf, dtype=like.dtype, device=like.device)
    return blocked.triu_(diagonal=1)


def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * a @ b for batches of matrices."""
    # With beta 0 the first argument is ignored; alpha scales the fp32 sums before they are rounded.
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)
