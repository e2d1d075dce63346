"""The kernels between products against the same formulas in fp64, and against themselves in other batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from engine.cpu import operators

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
# Of a result of fp32 arithmetic, and of its rounding to bfloat16 besides.
STEP = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
# One thread; as many as torch has.
ROWS = [1, 3, 400]


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=STEP[dtype], atol=STEP[dtype])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_residual_and_norms(rows: int, dtype: torch.dtype) -> None:
    hidden, delta = random(rows, 60), (3 * random(rows, 60)).to(dtype)
    weight, post = random(60), 1 + random(60)
    close(operators.normed(hidden, weight, EPS, dtype), norm(hidden.double(), weight.double()), dtype)
    for of_delta in (None, post):
        added = delta.double() if of_delta is None else norm(delta.double(), post.double())
        expected = hidden.double() + added
        close(operators.summed(hidden, delta, of_delta, EPS), expected, torch.float32)
        both = operators.summed_and_normed(hidden, delta, of_delta, weight, EPS)
        close(both[0], expected, torch.float32)
        close(both[1], norm(expected, weight.double()), dtype)
        assert both[1].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotation(rows: int, dtype: torch.dtype, *, has_norm: bool) -> None:
    qkv, weight = random(rows, 5, 20).to(dtype), random(4, 20)
    angle = random(rows, 1, 10).double()
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    signed = torch.cat([-sin[..., :10], sin[..., 10:]], dim=-1)
    expected = qkv.double()
    heads = expected[:, :4]
    if has_norm:
        heads = norm(heads, weight.double())
    # As pairs (x, y) that are turned by the angle.
    x, y = heads[..., :10], heads[..., 10:]
    c, s = cos[..., :10], sin[..., :10]
    expected[:, :4] = torch.cat([x * c - y * s, y * c + x * s], dim=-1)
    operators.rotate(
        qkv, (cos.float(), signed.float()), num_heads=4, norm_Nh=weight if has_norm else None, eps=EPS
    )
    close(qkv, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gate(rows: int, dtype: torch.dtype, activation: str) -> None:
    gate_up = (4 * random(rows, 2 * 84)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    function: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu
    if activation != "silu":

        def function(x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    out = operators.gated(gate_up, activation)
    close(out, function(gate) * up, dtype)
    assert (out.dtype, out.shape) == (dtype, (rows, 84))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_large_numbers_are_gated_like_small_ones_and_nan_stays(activation: str) -> None:
    gate = torch.tensor([[-1e30, -300.0, -90.0, 0.0, 90.0, 300.0, 1e30, torch.nan, torch.inf, -torch.inf]])
    out = operators.gated(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)[0]
    assert out[:3].abs().max() < 1e-6
    assert out[3:7].tolist() == pytest.approx([0.0, 90.0, 300.0, 1e30])
    assert out[7].isnan()
    assert out[8] == torch.inf
    assert not out[9] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, bad: float) -> None:
    hidden, delta = random(3, 60), random(3, 60).to(dtype)
    delta[1, 7] = bad
    summed, normed = operators.summed_and_normed(hidden, delta, None, torch.ones(60), EPS)
    for result in (summed, normed):
        assert result[[0, 2]].isfinite().all()
        assert not result[1].isfinite().all()


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    x = torch.cat([random(4096) * 10.0 ** (index - 20) for index in range(40)])
    ties = (torch.arange(1 << 12, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-40, torch.inf, -torch.inf, torch.nan])
    for values in (x, ties, edges):
        hidden = values.reshape(1, -1).contiguous()
        zero = torch.zeros_like(hidden, dtype=torch.bfloat16)
        out = operators.summed(hidden, zero, None, EPS)
        torch.testing.assert_close(out, hidden + 0.0, rtol=0, atol=0, equal_nan=True)
        # A rotation by nothing only rounds.
        qkv = hidden.bfloat16().view(1, -1, 2)
        angles = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
        kept = qkv.clone()
        operators.rotate(qkv, angles, num_heads=qkv.shape[1], norm_Nh=None, eps=EPS)
        finite = kept.isfinite().all(dim=-1)
        assert torch.equal(qkv[finite], kept[finite] + 0.0)
    wide = torch.cat([x, ties[ties.isfinite()]])
    gate_up = torch.cat([torch.full_like(wide, 200.0), wide])[None]
    assert torch.equal(operators.gated(gate_up, "silu")[0], 200.0 * wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_numbers_in_every_batch(dtype: torch.dtype) -> None:
    hidden, delta, weight = random(600, 60), random(600, 60).to(dtype), random(60)
    gate_up = random(600, 168).to(dtype)
    whole = operators.summed_and_normed(hidden, delta, weight, weight, EPS)
    gated = operators.gated(gate_up, "silu")
    for row in (0, 299, 599):
        one = slice(row, row + 1)
        alone = operators.summed_and_normed(hidden[one], delta[one], weight, weight, EPS)
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))
        assert torch.equal(operators.gated(gate_up[one], "silu"), gated[one])
