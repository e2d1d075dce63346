"""The gate of an MLP: one pass between its two matrix products.

    out[t, f] = activation(gate[t, f]) * up[t, f]
    silu(g) = g * sigmoid(g);  gelu_pytorch_tanh(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g^3))

The second one is the usual g / 2 * (1 + tanh(u)), since 1 + tanh(u) = 2 * sigmoid(2 * u). Everything is fp32
between a load and the one rounding of its result; plain torch rounds the activation too.

Layout: gate_up [T, 2F], gate first, rows contiguous, any row stride; out [T, F] alike, in the same dtype.
Grid: (tokens, tiles of F).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.kernel import Config, Kernel, Launch, type_name
from engine.model.layers import gated

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def gated_activation_reference(gate_up_T2F: torch.Tensor, activation: str) -> torch.Tensor:
    """The same in plain torch, rounded once as well."""
    return gated(gate_up_T2F.float(), activation).to(gate_up_T2F.dtype)


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    out_stride,
    WIDTH: tl.constexpr,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    TWICE_ROOT_TWO_OVER_PI: tl.constexpr = 1.5957691216057308
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate_ptrs = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=inside, other=0.0).to(tl.float32)
    angle = gate
    if IS_GELU:
        angle = TWICE_ROOT_TWO_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    # 2^x overflows to infinity for gates far below zero: the quotient is then zero, as it should be.
    activated = gate / (1.0 + tl.math.exp2(-LOG2_E * angle))
    out = (activated * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=inside)


KERNEL = Kernel(
    name="gated_activation",
    function=_gated_activation_kernel,
    # 8 elements a thread and load make 16 bytes; the small tile keeps more of a device busy with few tokens.
    configs=(
        Config(constants={"BLOCK": 1024}, num_warps=4),
        Config(constants={"BLOCK": 512}, num_warps=2),
        Config(constants={"BLOCK": 2048}, num_warps=4),
        Config(constants={"BLOCK": 4096}, num_warps=8),
    ),
)


def gated_activation(
    gate_up_T2F: torch.Tensor, activation: str, *, choices: Choices = UNMEASURED
) -> torch.Tensor:
    """[T, F] in the input's dtype. activation: one of ACTIVATIONS."""
    num_tokens, width = gate_up_T2F.shape
    out_TF = torch.empty((num_tokens, width // 2), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    choices.run(gated_activation_launch(gate_up_T2F, activation, out_TF))
    return out_TF


def gated_activation_launch(gate_up_T2F: torch.Tensor, activation: str, out_TF: torch.Tensor) -> Launch:
    """The call as data. Raises ValueError for tensors or an activation that the kernel cannot take."""
    num_tokens, width = out_TF.shape
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if gate_up_T2F.shape != (num_tokens, 2 * width) or gate_up_T2F.dtype != out_TF.dtype:
        raise ValueError("gate_up must be [T, 2F] for out [T, F], both of one dtype")
    if gate_up_T2F.stride(1) != 1 or out_TF.stride(1) != 1:
        raise ValueError("gate_up and out must have contiguous rows")
    return Launch(
        kernel=KERNEL,
        grid=lambda constants: (num_tokens, triton.cdiv(width, constants["BLOCK"])),
        arguments={
            "gate_up_ptr": gate_up_T2F,
            "out_ptr": out_TF,
            "gate_up_stride": gate_up_T2F.stride(0),
            "out_stride": out_TF.stride(0),
        },
        constants={"WIDTH": width, "IS_GELU": activation == "gelu_pytorch_tanh"},
        shape=(("width", width), ("activation", activation), ("dtype", type_name(out_TF))),
    )
