"""The gate of an MLP against fp64, over awkward shapes."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.gated_activation import (
    ACTIVATIONS,
    KERNEL,
    gated_activation,
    gated_activation_launch,
    gated_activation_reference,
)
from engine.kernels.kernel import Config

GUARD = 7.0


def framed(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A random [num_rows, width] view, and the memory around it, which is full of GUARD."""
    memory = torch.full((num_rows + 2, width + 5), GUARD, dtype=dtype)
    view = memory[1:-1, 2 : 2 + width]
    view.copy_(torch.randn(num_rows, width) * 3)
    return view, memory


def is_untouched(view: torch.Tensor, memory: torch.Tensor) -> bool:
    outside = memory.clone()
    outside[1:-1, 2 : 2 + view.shape[1]] = GUARD
    return bool((outside == GUARD).all())


def expected(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """In fp64, by the usual formulas."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    angle = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(angle)) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 16), (1, 1), (3, 15), (16, 17), (63, 240), (2, 2049)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_fp64_and_touches_nothing_else(
    activation: str, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(width)
    gate_up, gate_up_memory = framed(num_tokens, 2 * width, dtype)
    before = gate_up.clone()
    out, out_memory = framed(num_tokens, width, dtype)
    launch = gated_activation_launch(gate_up, activation, out)

    launch.run(KERNEL.configs[0])

    torch.testing.assert_close(
        out.double(), expected(before, activation), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
    )
    assert torch.equal(gate_up, before)
    assert is_untouched(gate_up, gate_up_memory)
    assert is_untouched(out, out_memory)


@pytest.mark.parametrize("config", KERNEL.configs, ids=str)
def test_every_configuration_covers_all_columns(config: Config) -> None:
    gate_up, out = torch.randn(2, 2 * 4100), torch.zeros(2, 4100)

    gated_activation_launch(gate_up, "silu", out).run(config)

    torch.testing.assert_close(out.double(), expected(gate_up, "silu"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_gates_are_closed_or_open_and_never_nan(activation: str) -> None:
    # exp(104) and the cube of 65,504 are beyond what fp32 and fp16 hold.
    gates = torch.tensor([-65504.0, -104.0, 0.0, 104.0, 65504.0], dtype=torch.float16)
    gate_up = torch.cat([gates, torch.full_like(gates, 0.5)])[None]

    out = gated_activation(gate_up, activation)

    assert out[0].tolist() == [0.0, 0.0, 0.0, 52.0, 32752.0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_stays_so(activation: str) -> None:
    gates = torch.tensor([math.inf, -math.inf, math.nan, 2.0])
    ups = torch.tensor([1.0, 1.0, 1.0, math.nan])

    out = gated_activation(torch.cat([gates, ups])[None], activation)[0]

    assert out[0] == math.inf
    # Minus infinity times a closed gate, as in plain torch.
    assert out[1:].isnan().all()


def test_the_reference_is_fp64_rounded() -> None:
    gate_up = torch.randn(3, 40).bfloat16()

    for activation in ACTIVATIONS:
        torch.testing.assert_close(
            gated_activation_reference(gate_up, activation).double(),
            expected(gate_up, activation),
            rtol=2**-8,
            atol=1e-6,
        )


def test_rows_beyond_32_bits_are_found() -> None:
    # Pages that nobody touches do not exist: 8 GB of addresses, three pages of memory.
    stride = 2**30 + 8
    memory = torch.empty(2 * stride + 16, dtype=torch.bfloat16)
    gate_up = memory.as_strided((3, 16), (stride, 1))
    gate_up.copy_(torch.randn(3, 16))
    out = torch.empty(2 * stride + 8, dtype=torch.bfloat16).as_strided((3, 8), (stride, 1))

    gated_activation_launch(gate_up, "silu", out).run(KERNEL.configs[0])

    torch.testing.assert_close(out.double(), expected(gate_up, "silu"), rtol=2**-7, atol=1e-6)


def test_what_the_kernel_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'relu'; it must be one of silu"):
        gated_activation(torch.zeros(2, 4), "relu")
    with pytest.raises(ValueError, match="contiguous rows"):
        gated_activation(torch.zeros(4, 2).T, "silu")
    with pytest.raises(ValueError, match=r"\[T, 2F\]"):
        gated_activation(torch.zeros(2, 5), "silu")
    with pytest.raises(ValueError, match="one dtype"):
        gated_activation_launch(torch.zeros(2, 4), "silu", torch.zeros(2, 2).half())
