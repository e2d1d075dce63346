"""Residual add and RMSNorm in one pass: what stands between two matrix products.

    hidden[t] += delta[t];  out[t] = hidden[t] / sqrt(mean(hidden[t]^2) + eps) * weight

hidden is the fp32 residual stream and is changed in place; delta is the product that came before, in the
weights' dtype, or None. With delta_weight, delta is normed by itself first (families with norms behind
attention and MLP). All sums are fp32. out has the weights' dtype.

Layout: hidden, delta, out are [T, D], rows D elements long and contiguous, any row stride; weights [D] fp32.
Grid: one program per row, which keeps it in registers: read once, written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.kernel import Config, Kernel, Launch, type_name


def add_rms_norm_reference(
    hidden_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    *,
    delta_weight_D: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same in plain torch; changes hidden in place."""
    if delta_TD is not None:
        delta_TD = delta_TD.float()
        if delta_weight_D is not None:
            delta_TD = functional.rms_norm(delta_TD, weight_D.shape, delta_weight_D, eps)
        hidden_TD += delta_TD
    return functional.rms_norm(hidden_TD, weight_D.shape, weight_D, eps).to(dtype)


@triton.jit
def _add_rms_norm_kernel(
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    delta_weight_ptr,
    out_ptr,
    hidden_stride,
    delta_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    hidden = tl.load(hidden_ptr + row * hidden_stride + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA_WEIGHT:
            delta_weight = tl.load(delta_weight_ptr + columns, mask=inside, other=0.0)
            delta *= tl.math.rsqrt(tl.sum(delta * delta) / WIDTH + eps) * delta_weight
        hidden += delta
        tl.store(hidden_ptr + row * hidden_stride + columns, hidden, mask=inside)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = hidden * tl.math.rsqrt(tl.sum(hidden * hidden) / WIDTH + eps) * weight
    tl.store(out_ptr + row * out_stride + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


KERNEL = Kernel(
    name="add_rms_norm",
    function=_add_rms_norm_kernel,
    configs=tuple(Config(constants={}, num_warps=warps) for warps in (4, 8, 16)),
)


def add_rms_norm(
    hidden_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    *,
    delta_weight_D: torch.Tensor | None = None,
    dtype: torch.dtype,
    choices: Choices = UNMEASURED,
) -> torch.Tensor:
    """[T, D] in dtype; adds delta to hidden in place."""
    out_TD = torch.empty(hidden_TD.shape, dtype=dtype, device=hidden_TD.device)
    choices.run(
        add_rms_norm_launch(hidden_TD, delta_TD, weight_D, eps, out_TD, delta_weight_D=delta_weight_D)
    )
    return out_TD


def add_rms_norm_launch(
    hidden_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    *,
    delta_weight_D: torch.Tensor | None = None,
) -> Launch:
    """The call as data. Raises ValueError for tensors that the kernel cannot read."""
    num_tokens, width = hidden_TD.shape
    _check(hidden_TD, delta_TD, weight_D, out_TD)
    return Launch(
        kernel=KERNEL,
        grid=lambda _: (num_tokens,),
        arguments={
            "hidden_ptr": hidden_TD,
            "delta_ptr": delta_TD,
            "weight_ptr": weight_D,
            "delta_weight_ptr": delta_weight_D,
            "out_ptr": out_TD,
            "hidden_stride": hidden_TD.stride(0),
            "delta_stride": 0 if delta_TD is None else delta_TD.stride(0),
            "out_stride": out_TD.stride(0),
            "eps": eps,
        },
        constants={
            "WIDTH": width,
            "HAS_DELTA": delta_TD is not None,
            "HAS_DELTA_WEIGHT": delta_weight_D is not None,
            "BLOCK": triton.next_power_of_2(width),
        },
        shape=(
            ("width", width),
            ("dtype", type_name(out_TD)),
            ("delta", "none" if delta_TD is None else type_name(delta_TD)),
            ("delta_norm", int(delta_weight_D is not None)),
        ),
    )


def _check(
    hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, out_TD: torch.Tensor
) -> None:
    if hidden_TD.dtype != torch.float32 or weight_D.dtype != torch.float32:
        raise ValueError(f"hidden and weight must be float32; they are {hidden_TD.dtype}, {weight_D.dtype}")
    rows = [hidden_TD, out_TD] if delta_TD is None else [hidden_TD, out_TD, delta_TD]
    if any(tensor.shape != hidden_TD.shape or tensor.stride(1) != 1 for tensor in rows):
        raise ValueError("hidden, delta and out must have one shape and contiguous rows")
