"""The kernels of a layer as functions of tensors. All tensors are contiguous unless said otherwise.

Shape suffixes: T tokens, D hidden, F intermediate, M heads of q, k and v together, N of them q and k, K kv
heads, h head_dim, B blocks of the cache, b block_size.
"""

from __future__ import annotations

import torch

from engine.cpu.layer_kernels import gate_kernel, residual_kernel, rotation_kernel, store_kernel
from engine.cpu.team import float_bits, max_threads


def normed(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight in dtype; x, weight: fp32."""
    out = torch.empty_like(x_TD, dtype=dtype)
    _residual(x_TD, eps, normed_TD=out, weight_D=weight_D)
    return out


def summed(
    hidden_TD: torch.Tensor, delta_TD: torch.Tensor, post_D: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """hidden + delta in fp32. post: of a norm of delta before that."""
    out = torch.empty_like(hidden_TD)
    _residual(hidden_TD, eps, delta_TD=delta_TD, summed_TD=out, post_D=post_D)
    return out


def summed_and_normed(
    hidden_TD: torch.Tensor,
    delta_TD: torch.Tensor,
    post_D: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """summed(), and normed() of it in the dtype of delta."""
    out, x = torch.empty_like(hidden_TD), torch.empty_like(delta_TD)
    _residual(hidden_TD, eps, delta_TD=delta_TD, summed_TD=out, normed_TD=x, post_D=post_D, weight_D=weight_D)
    return out, x


def _residual(
    hidden_TD: torch.Tensor,
    eps: float,
    *,
    delta_TD: torch.Tensor | None = None,
    summed_TD: torch.Tensor | None = None,
    normed_TD: torch.Tensor | None = None,
    post_D: torch.Tensor | None = None,
    weight_D: torch.Tensor | None = None,
) -> None:
    half = normed_TD if delta_TD is None else delta_TD
    assert half is not None
    rows, width = hidden_TD.shape
    tensors = (hidden_TD, delta_TD, summed_TD, normed_TD, post_D, weight_D)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    residual_kernel(half.element_size())(hidden_TD.numel(), rows, width, float_bits(eps), *addresses)


def rotate(
    qkv_TMh: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    num_heads: int,
    norm_Nh: torch.Tensor | None,
    eps: float,
) -> None:
    """Turns the first num_heads heads in place, behind their norms if they have any.

    angles: cosines and sines of the tokens' positions, [T, 1, h] each.
    """
    cos_T1h, sin_T1h = angles
    rows, all_heads, head_dim = qkv_TMh.shape
    room = torch.empty(2 * head_dim * max_threads(), dtype=torch.float32)
    rotation_kernel(qkv_TMh.element_size(), head_dim)(
        rows * num_heads * head_dim,
        rows,
        num_heads,
        all_heads,
        float_bits(eps),
        qkv_TMh.data_ptr(),
        cos_T1h.data_ptr(),
        sin_T1h.data_ptr(),
        0 if norm_Nh is None else norm_Nh.data_ptr(),
        room.data_ptr(),
    )


def gated(gate_up_T2F: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up; the input holds both, gate first. activation: "silu" or "gelu_pytorch_tanh"."""
    rows, both = gate_up_T2F.shape
    out = gate_up_T2F.new_empty(rows, both // 2)
    kernel = gate_kernel(out.element_size(), is_silu=activation == "silu")
    kernel(4 * out.numel(), rows, both // 2, gate_up_T2F.data_ptr(), out.data_ptr())
    return out


def store(kv_T2Kh: torch.Tensor, cache_B2Kbh: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes new keys and values into their slots of one layer.

    kv: rows may lie apart.  cache: strided as its layout demands, of the same dtype.  slots: [T] int64.
    """
    rows, _, num_kv_heads, head_dim = kv_T2Kh.shape
    block, pair, head, token, _ = cache_B2Kbh.stride()
    store_kernel(kv_T2Kh.element_size())(
        kv_T2Kh.numel(),
        rows,
        num_kv_heads,
        head_dim,
        kv_T2Kh.stride(0),
        kv_T2Kh.data_ptr(),
        cache_B2Kbh.data_ptr(),
        block,
        pair,
        head,
        token,
        cache_B2Kbh.shape[3],
        slots.data_ptr(),
    )
