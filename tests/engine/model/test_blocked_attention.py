"""Both attention paths of a prompt chunk against the formula in fp64, and the memory of a block's scores."""

from __future__ import annotations

import pytest
import torch

from engine.model import blocked_attention as blocked
from engine.model.attention import causal_mask, fused_attention
from tests.engine.model.paged_attention import exact_attention

SCALE = 0.4
# Heads, kv heads, new tokens, context, head_dim.
SIZES = [(3, 1, 5, 5, 20), (4, 2, 37, 37, 24), (6, 3, 2, 63, 8), (2, 2, 33, 70, 10), (3, 1, 150, 171, 6)]
# One key, around a block of 128 rows, around a context of 171, and more than there is.
WINDOWS = [0, 1, 2, 22, 127, 128, 129, 170, 171, 1000]


def attended(path: str, q_HTh: torch.Tensor, kv_2KCh: torch.Tensor, window: int) -> torch.Tensor:
    """[H, T, h] by one of the two paths."""
    if path == "fused":
        mask = causal_mask(q_HTh.shape[1], kv_2KCh.shape[2], window, q_HTh.device)
        return fused_attention(q_HTh, kv_2KCh, mask, scale=SCALE)
    q_KGTh = q_HTh.unflatten(0, (kv_2KCh.shape[1], -1))
    return blocked.blocked_attention(q_KGTh, kv_2KCh[0], kv_2KCh[1], window=window, scale=SCALE).flatten(0, 1)


def assert_exact(path: str, sizes: tuple[int, int, int, int, int], window: int) -> None:
    num_heads, num_kv_heads, num_new, context, head_dim = sizes
    generator = torch.Generator().manual_seed(context)
    q_THh = torch.randn(num_new, num_heads, head_dim, generator=generator) * 2
    k_CKh, v_CKh = torch.randn(2, context, num_kv_heads, head_dim, generator=generator)
    kv_2KCh = torch.stack([k_CKh, v_CKh], dim=1).permute(1, 2, 0, 3)

    output = attended(path, q_THh.transpose(0, 1), kv_2KCh, window).transpose(0, 1)

    expected = exact_attention(q_THh, k_CKh, v_CKh, window, SCALE)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", ["blocked", "fused"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_chunk_attends_causally_within_its_window(
    path: str, sizes: tuple[int, int, int, int, int], window: int
) -> None:
    assert_exact(path, sizes, window)


@pytest.mark.parametrize("max_scores", [1, 100, 1000, 4000])
@pytest.mark.parametrize("window", [0, 22])
def test_any_size_of_block_gives_the_same(
    max_scores: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # From a row of a head at a time to all three heads and dozens of rows.
    monkeypatch.setattr(blocked, "_MAX_SCORES", max_scores)

    assert_exact("blocked", (6, 3, 60, 63, 8), window)


def test_scores_of_a_block_stay_within_four_million() -> None:
    # kv heads, query heads of each, context, window: kv heads and rows of a block.
    assert blocked.size_of_block(3, 3, 512) == (3, 128)
    assert blocked.size_of_block(3, 3, 8192) == (1, 128)
    assert blocked.size_of_block(8, 4, 32768) == (1, 32)
    assert blocked.size_of_block(8, 8, 131072) == (1, 4)
    assert 1 * 4 * (8 * 131072) == 2**22
    # Behind a window a block's rows see the window and one another.
    assert blocked.size_of_block(8, 4, 131072, 896) == (8, 128)
    assert 8 * 128 * (4 * (896 + 128)) == 2**22
