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


def rotate_(x_TNh: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> None:
    """Rotates heads in place, in fp32; the tables are engine/model/rope.py's rows of each position."""
    wide = x_TNh.float()
    swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    x_TNh.copy_(torch.addcmul(wide * cos_T1h, swapped, sin_T1h))


def silu_times_up(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; the input holds both, gate first."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
