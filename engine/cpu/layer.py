"""A layer around its attention on CPUs: torch's products, and one kernel for what lies between two of them.

An engine.model.layer.LayerCode; it computes what that module computes, in fewer passes over the tokens.

Shape suffixes: T tokens, D hidden, H query heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.cpu import operators
from engine.model.layer import Mlp

if TYPE_CHECKING:
    from baton.model_config import ModelConfig
    from engine.model.layer import LayerWeights


def project(
    hidden_TD: torch.Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    cos_T1h: torch.Tensor,
    sin_T1h: torch.Tensor,
) -> torch.Tensor:
    """As engine.model.layer.project()."""
    num_rotated = config.num_heads + config.num_kv_heads
    x_TD = operators.normed(hidden_TD, weights.input_norm, config.rms_norm_eps, weights.qkv.weight.dtype)
    qkv_TMh = weights.qkv(x_TD).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
    operators.rotate(
        qkv_TMh,
        (cos_T1h, sin_T1h),
        num_heads=num_rotated,
        norm_Nh=weights.head_norm,
        eps=config.rms_norm_eps,
    )
    return qkv_TMh


def finish(
    hidden_TD: torch.Tensor, attended_TA: torch.Tensor, weights: LayerWeights, config: ModelConfig
) -> torch.Tensor:
    """As engine.model.layer.finish()."""
    eps, mlp = config.rms_norm_eps, weights.mlp
    hidden_TD, x_TD = operators.summed_and_normed(
        hidden_TD, weights.output(attended_TA), weights.attention_out_norm, weights.mlp_norm, eps
    )
    if isinstance(mlp, Mlp):
        out_TD = mlp.down(operators.gated(mlp.gate_up(x_TD), mlp.activation))
    else:
        out_TD = mlp(x_TD)
    return operators.summed(hidden_TD, out_TD, weights.mlp_out_norm, eps)
