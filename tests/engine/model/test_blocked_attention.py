"""Both attention paths of a prompt chunk against the formula in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from engine.model import blocked_attention as blocked
from engine.model.attention import causal_mask, fused_attention


def exact_attention(q_HTh: torch.Tensor, k_KCh: torch.Tensor, v_KCh: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(h)) v in fp64, query by query over the keys it may see."""
    group = q_HTh.shape[0] // k_KCh.shape[0]
    num_new, context = q_HTh.shape[1], k_KCh.shape[1]
    out = torch.empty(q_HTh.shape, dtype=torch.float64)
    for head in range(q_HTh.shape[0]):
        keys, values = k_KCh[head // group].double(), v_KCh[head // group].double()
        for row in range(num_new):
            seen = context - num_new + row + 1
            scores = keys[:seen] @ q_HTh[head, row].double() / math.sqrt(q_HTh.shape[2])
            out[head, row] = torch.softmax(scores, dim=0) @ values[:seen]
    return out


@pytest.mark.parametrize("path", ["blocked", "fused"])
@pytest.mark.parametrize(
    "sizes",
    [(3, 1, 5, 5, 20), (4, 2, 37, 37, 24), (6, 3, 2, 63, 8), (2, 2, 33, 70, 10), (3, 1, 150, 171, 6)],
)
def test_a_chunk_attends_causally_to_its_context(path: str, sizes: tuple[int, int, int, int, int]) -> None:
    num_heads, num_kv_heads, num_new, context, head_dim = sizes
    generator = torch.Generator().manual_seed(context)
    q_HTh = torch.randn(num_new, num_heads, head_dim, generator=generator).transpose(0, 1) * 2
    kv_2KCh = torch.randn(context, 2, num_kv_heads, head_dim, generator=generator).permute(1, 2, 0, 3)

    if path == "blocked":
        q_KGTh = q_HTh.unflatten(0, (num_kv_heads, -1))
        out_HTh = blocked.blocked_attention(q_KGTh, kv_2KCh[0], kv_2KCh[1], scale=head_dim**-0.5).flatten(0, 1)
    else:
        mask = causal_mask(num_new, context, 0, q_HTh.device)
        out_HTh = fused_attention(q_HTh, kv_2KCh, mask, scale=head_dim**-0.5)

    expected = exact_attention(q_HTh, kv_2KCh[0], kv_2KCh[1])
    torch.testing.assert_close(out_HTh.double(), expected, rtol=0, atol=1e-5)


def test_scores_of_a_block_stay_bounded() -> None:
    assert blocked.rows_per_block(9, 512) == 128
    assert blocked.rows_per_block(32, 8192) * 32 * 8192 == 2**22
    assert blocked.rows_per_block(32, 1 << 20) == 16
