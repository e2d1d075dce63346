"""The small operators of a decoder layer, in plain torch.

Shape suffixes: T tokens, D hidden, F intermediate, N heads of q and k together, h head_dim.
They hold no weights and know no cache.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, all in fp32: the residual stream and the norms' weights are."""
    return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def norm_heads(x_TNh: torch.Tensor, weight_Nh: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm() of every head over its own h elements; weight: fp32, of each head. Returns fp32."""
    return functional.rms_norm(x_TNh.float(), x_TNh.shape[-1:], eps=eps).mul_(weight_Nh)


def rotated(x_TNh: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
    """Heads turned by their positions' angles, in fp32; the tables are rows of engine.model.rope.Rope."""
    wide = x_TNh.float()
    swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos_T1h, swapped, sin_T1h)


def gated(gate_up_T2F: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up; the input holds both, gate first. activation: "silu" or "gelu_pytorch_tanh"."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)
