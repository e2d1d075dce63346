"""The residual add with its norm against plain torch, over awkward shapes."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference

GUARD = 7.0


def framed(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A random [num_rows, width] view, and the memory around it, which is full of GUARD."""
    memory = torch.full((num_rows + 2, width + 5), GUARD, dtype=dtype)
    view = memory[1:-1, 2 : 2 + width]
    view.copy_(torch.randn(num_rows, width))
    return view, memory


def is_untouched(view: torch.Tensor, memory: torch.Tensor) -> bool:
    outside = memory.clone()
    outside[1:-1, 2 : 2 + view.shape[1]] = GUARD
    return bool((outside == GUARD).all())


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("width", [1, 15, 16, 240, 576])
@pytest.mark.parametrize("has_delta_weight", [False, True])
def test_equals_plain_torch_and_touches_nothing_else(
    num_tokens: int, width: int, has_delta_weight: bool
) -> None:
    torch.manual_seed(width)
    hidden, hidden_memory = framed(num_tokens, width, torch.float32)
    delta, delta_memory = framed(num_tokens, width, torch.bfloat16)
    weight = torch.randn(width)
    delta_weight = torch.randn(width) if has_delta_weight else None
    expected_hidden = hidden.clone()
    arguments = (delta, weight, 1e-5)
    expected = add_rms_norm_reference(
        expected_hidden, *arguments, delta_weight_D=delta_weight, dtype=torch.bfloat16
    )

    normed = add_rms_norm(hidden, *arguments, delta_weight_D=delta_weight, dtype=torch.bfloat16)

    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(normed, expected, rtol=2**-7, atol=1e-6)
    assert is_untouched(hidden, hidden_memory)
    assert is_untouched(delta, delta_memory)


def test_a_second_call_adds_again() -> None:
    hidden, delta, weight = torch.zeros(2, 20), torch.ones(2, 20), torch.ones(20)

    for expected in (1.0, 2.0):
        normed = add_rms_norm(hidden, delta, weight, 0.0, dtype=torch.float32)
        assert (hidden == expected).all()
        torch.testing.assert_close(normed, torch.ones(2, 20))


def test_sums_beyond_fp16_range_are_fp32() -> None:
    # 4,096 squares of 5 sum to 102,400; fp16 ends at 65,504.
    delta = torch.full((1, 4096), 5.0, dtype=torch.float16)

    normed = add_rms_norm(torch.zeros(1, 4096), delta, torch.ones(4096), 1e-6, dtype=torch.float16)

    torch.testing.assert_close(normed.float(), torch.ones(1, 4096), rtol=0, atol=1e-3)


def test_without_delta_hidden_is_only_read() -> None:
    hidden = torch.randn(3, 20)
    before = hidden.clone()

    normed = add_rms_norm(hidden, None, torch.ones(20), 1e-5, dtype=torch.float32)

    assert torch.equal(hidden, before)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(before, (20,), eps=1e-5))


def test_what_the_kernel_cannot_read_is_refused() -> None:
    hidden, weight = torch.zeros(2, 4), torch.ones(4)
    with pytest.raises(ValueError, match="float32"):
        add_rms_norm(hidden.half(), None, weight, 1e-5, dtype=torch.float16)
    with pytest.raises(ValueError, match="contiguous rows"):
        add_rms_norm(torch.zeros(4, 2).T, None, weight, 1e-5, dtype=torch.float16)
