"""One decoder layer around its attention: what comes before it and what comes behind.

    q, k, v = rotate(norm_heads(x @ qkv)),  x = norm(hidden)          -> project()
    hidden += norm(attended @ output);  hidden += norm(mlp(norm(hidden)))  -> finish()

norm_heads and the norms behind attention and MLP exist in some families only. Attention itself, and the
cache, are engine/model/attention.py's. The residual stream `hidden` is fp32 whatever the weights are; see
docs/adr/0003. Weights are arguments, not state: what is compiled for one layer serves all.

Shape suffixes: T tokens, D hidden, F intermediate, H query heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from engine.model.kv_range import infinities_to_nan_
from engine.model.layers import gated, norm_heads, rms_norm, rotated
from engine.model.moe import Experts
from engine.model.packed import packed_product

if TYPE_CHECKING:
    from baton.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer: weight [out, in], perhaps packed (engine.model.packed); bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        if self.weight.is_mkldnn:
            return packed_product(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate(x)) * up(x)); gate_up holds both, gate first: one product."""

    activation: str
    gate_up: Projection
    down: Projection

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] in the weights' dtype."""
        return self.down(gated(self.gate_up(x_TD), self.activation))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. qkv holds q, k and v in this order: one product. Norms are fp32.

    head_norm: [H + K, h], the norm of each query and key head; None in most families.
    attention_out_norm, mlp_out_norm: [D], behind attention and MLP; None in most families.
    """

    input_norm: torch.Tensor
    qkv: Projection
    head_norm: torch.Tensor | None
    output: Projection
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp | Experts
    mlp_out_norm: torch.Tensor | None


class LayerCode(Protocol):
    """What computes layers: this module, or engine.model.compiled.CompiledLayer."""

    def project(
        self,
        hidden_TD: torch.Tensor,
        weights: LayerWeights,
        config: ModelConfig,
        cos_T1h: torch.Tensor,
        sin_T1h: torch.Tensor,
    ) -> torch.Tensor:
        """As project() below."""

    def finish(
        self, hidden_TD: torch.Tensor, attended_TA: torch.Tensor, weights: LayerWeights, config: ModelConfig
    ) -> torch.Tensor:
        """As finish() below."""


def project(
    hidden_TD: torch.Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    cos_T1h: torch.Tensor,
    sin_T1h: torch.Tensor,
) -> torch.Tensor:
    """Queries, keys and values of the tokens, in the weights' dtype: [T, H + 2K, h], in this order."""
    num_rotated = config.num_heads + config.num_kv_heads
    x_TD = rms_norm(hidden_TD, weights.input_norm, config.rms_norm_eps).to(weights.qkv.weight.dtype)
    qkv = weights.qkv(x_TD).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
    heads = qkv[:, :num_rotated]
    if weights.head_norm is not None:
        heads = norm_heads(heads, weights.head_norm, config.rms_norm_eps)
    qkv[:, :num_rotated] = rotated(heads, cos_T1h, sin_T1h)
    if qkv.dtype == torch.float16:
        infinities_to_nan_(qkv[:, config.num_heads :])
    return qkv


def finish(
    hidden_TD: torch.Tensor, attended_TA: torch.Tensor, weights: LayerWeights, config: ModelConfig
) -> torch.Tensor:
    """The residual stream behind the layer, [T, D] fp32. attended: [T, H * h]."""
    hidden_TD, x_TD = attention_added(hidden_TD, attended_TA, weights, config)
    return mlp_added(hidden_TD, x_TD, weights, config)


def attention_added(
    hidden_TD: torch.Tensor, attended_TA: torch.Tensor, weights: LayerWeights, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half of finish(): the residual stream, and what the MLP takes; both [T, D]."""
    eps = config.rms_norm_eps
    hidden_TD = hidden_TD + _normed(weights.output(attended_TA), weights.attention_out_norm, eps)
    return hidden_TD, rms_norm(hidden_TD, weights.mlp_norm, eps).to(attended_TA.dtype)


def mlp_added(
    hidden_TD: torch.Tensor, x_TD: torch.Tensor, weights: LayerWeights, config: ModelConfig
) -> torch.Tensor:
    """The second half of finish()."""
    return hidden_TD + _normed(weights.mlp(x_TD), weights.mlp_out_norm, config.rms_norm_eps)


def _normed(x_TD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x_TD if weight_D is None else rms_norm(x_TD.float(), weight_D, eps)
