"""The likeliest tokens against torch's own search."""

from __future__ import annotations

import pytest
import torch

from engine.likeliest import candidates, likeliest

SIZES = [1, 63, 64, 101, 4096, 16_384, 49_152, 49_155]


def logits(rows: int, size: int) -> torch.Tensor:
    """With many ties, as half-precision products have them."""
    drawn = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    return (8 * drawn).round() / 8


@pytest.mark.parametrize("size", SIZES)
def test_the_likeliest_is_the_first_of_the_largest(size: int) -> None:
    found = likeliest(logits(5, size))
    assert found.dtype == torch.int64
    for row, token in zip(logits(5, size), found.tolist(), strict=True):
        assert token == (row == row.max()).nonzero()[0].item()
    assert torch.equal(likeliest(logits(5, size).double()), found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 64, 100])
def test_candidates_have_the_largest_logits(size: int, count: int) -> None:
    rows = logits(4, size)
    found = candidates(rows, count)
    assert found.shape == (4, min(count, size))
    assert all(len(set(ids)) == len(ids) for ids in found.tolist())
    expected = rows.topk(min(count, size), dim=-1).values
    assert torch.equal(rows.gather(1, found).sort(dim=-1, descending=True).values, expected)


def test_infinities_and_rows_of_one_value() -> None:
    rows = logits(3, 49_152)
    rows[0, 777], rows[0, 40_000] = torch.inf, -torch.inf
    rows[1] = 2.5
    rows[2] = -torch.inf
    assert likeliest(rows).tolist() == [777, 0, 0]
    found = candidates(rows, 64)
    assert 777 in found[0].tolist()
    assert all(len(set(ids)) == 64 for ids in found.tolist())


def test_a_view_that_is_not_contiguous() -> None:
    wide = logits(6, 2 * 16_384)
    rows = wide[:, 100 : 100 + 16_385]
    expected = rows.topk(64, dim=-1).values
    assert torch.equal(rows.gather(1, candidates(rows, 64)).sort(dim=-1, descending=True).values, expected)
    for row, token in zip(rows, likeliest(rows).tolist(), strict=True):
        assert token == (row == row.max()).nonzero()[0].item()
