"""Keys and values at the borders of float16, and infinities that must not go unnoticed."""

from __future__ import annotations

import pytest
import torch

from engine.model.kv_range import infinities_to_nan_, narrowed

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_float16_cannot_hold_is_its_largest_number(dtype: torch.dtype) -> None:
    x = torch.tensor([65280.0, 65536.0, -65536.0, 1e5, -3e38, -INF, INF, NAN, -0.0], dtype=dtype)
    wanted = [65280.0, 65504.0, -65504.0, 65504.0, -65504.0, -INF, INF, NAN, -0.0]
    torch.testing.assert_close(
        narrowed(x, torch.float16), torch.tensor(wanted, dtype=torch.float16), rtol=0, atol=0, equal_nan=True
    )


def test_between_the_largest_number_and_infinity_it_is_the_largest_number_too() -> None:
    # From 65520 on, half a step above 65504, float16 rounds to infinity.
    x = torch.tensor([65504.0, 65519.9, 65520.0, -65520.0])
    assert narrowed(x, torch.float16).tolist() == [65504.0, 65504.0, 65504.0, -65504.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_have_the_range_and_round_to_nearest(dtype: torch.dtype) -> None:
    x = torch.tensor([1e5, -3e38, 1 + 2**-8, 1 + 3 * 2**-8])
    assert torch.equal(narrowed(x, dtype), x.to(dtype))
    assert narrowed(x, dtype).isfinite().all()


def test_nothing_is_copied_where_nothing_changes() -> None:
    x = torch.tensor([1.0], dtype=torch.float16)
    assert narrowed(x, torch.float16) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_become_nan_and_nothing_else_changes(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [INF, 1.5, -INF, -0.0, torch.finfo(dtype).max, NAN, torch.finfo(dtype).tiny], dtype=dtype
    )
    before = x.clone()
    infinities_to_nan_(x)
    assert x.isnan().tolist() == [True, False, True, False, False, True, False]
    assert torch.equal(x[~x.isnan()], before[~x.isnan()])


def test_an_infinite_key_would_be_ignored_and_a_nan_is_not() -> None:
    # Why infinities are made NaN: a softmax gives -inf the weight 0.
    q, k = torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 1.0], [-INF, 1.0]])
    assert torch.softmax(k @ q, dim=0).tolist() == [1.0, 0.0]
    assert torch.softmax(infinities_to_nan_(k) @ q, dim=0).isnan().all()
