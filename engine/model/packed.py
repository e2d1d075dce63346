"""Weights in the order in which oneDNN's products read them, instead of row by row.

Owns when that pays: in bfloat16 on CPUs that compute it. A plain weight is reordered in each call; a product
of a packed one was measured to take half of its time for up to eight tokens, three quarters for 32, and 0.95
for 512.
"""

from __future__ import annotations

import torch


def suits_packing(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of such weights are faster packed."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(weight: torch.Tensor) -> torch.Tensor:
    """An opaque tensor of the same shape and dtype that packed_product() takes. weight: [out, in]."""
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return reordered


def packed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias; x: [T, in], weight: from packed()."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
