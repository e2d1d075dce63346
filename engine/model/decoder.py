"""The Llama-family decoder: embedding, layers, final norm and head, in plain torch.

Owns the weights. It knows the cache only as one strided view per layer, and neither
requests nor sampling.

    hidden += attention(rms_norm(hidden));  hidden += mlp(rms_norm(hidden))

The residual stream `hidden` is fp32 whatever the weights are; see docs/adr/0003.

Shape suffixes: T tokens, S rows whose logits are needed, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from engine.model.attention import AttentionPlan, attend, store
from engine.model.layers import rms_norm, rotate_, silu_times_up
from engine.model.rope import rope_table

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from engine.config import ModelConfig
    from engine.kv_cache import KVCache


# Logits per row that are computed again in fp32. A token that matters and is not among them would have
# to be misjudged by more than a rounding step.
REFINED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer: weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. qkv holds q, k and v in this order, gate_up gate and up: one product each."""

    input_norm: torch.Tensor
    qkv: Projection
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step's layers share. cos, sin: [T, 1, h] fp32 rows of the rope table."""

    token_ids: torch.Tensor
    logits_rows: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    plan: AttentionPlan


class Decoder:
    """A decoder on one device. Weights never change."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        layers: list[LayerWeights],
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._cos, self._sin = rope_table(config.rope, config.head_dim, config.max_model_len, self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and computation."""
        return self._embedding.dtype

    def prepare(self, batch: ForwardBatch, block_size: int) -> StepInputs:
        """Brings a batch to the device and builds everything that no layer changes."""
        positions = torch.from_numpy(batch.positions).to(self.device)
        return StepInputs(
            token_ids=torch.from_numpy(batch.token_ids).to(self.device),
            logits_rows=torch.from_numpy(batch.logits_rows).to(self.device),
            cos=self._cos[positions][:, None],
            sin=self._sin[positions][:, None],
            plan=AttentionPlan.build(batch, block_size, self.device),
        )

    def forward(self, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        """Stores the new tokens' KV in the cache; returns [S, V] fp32 logits."""
        hidden_TD = self._embedding[inputs.token_ids].float()
        last = len(self._layers) - 1
        for index, weights in enumerate(self._layers):
            attended = self._attention(hidden_TD, weights, inputs, cache.layer(index))
            if index == last:
                # Only the rows whose logits are needed go through the rest of the last layer.
                hidden_TD, attended = hidden_TD[inputs.logits_rows], attended[inputs.logits_rows]
            hidden_TD = hidden_TD + weights.output(attended)
            normed = self._normed(hidden_TD, weights.mlp_norm)
            hidden_TD = hidden_TD + weights.down(silu_times_up(weights.gate_up(normed)))
        return self._logits(self._normed(hidden_TD, self._norm))

    def _normed(self, hidden_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_TD, weight_D, self.config.rms_norm_eps).to(self.dtype)

    def _logits(self, normed_SD: torch.Tensor) -> torch.Tensor:
        """[S, V] fp32 logits.

        A half-precision product rounds its result: bfloat16 knows steps of 0.125 at 25, which
        makes ties of likely tokens. The likeliest are therefore computed again, in fp32.
        """
        logits_SV = functional.linear(normed_SD, self._head).float()
        if self.dtype == torch.float32:
            return logits_SV
        likely_SR = logits_SV.topk(min(REFINED, logits_SV.shape[1]), sorted=False).indices
        rows_SRD = self._head[likely_SR].float()
        refined_SR = torch.bmm(rows_SRD, normed_SD.float()[:, :, None])[:, :, 0]
        return logits_SV.scatter_(1, likely_SR, refined_SR)

    def _attention(
        self, hidden_TD: torch.Tensor, weights: LayerWeights, inputs: StepInputs, cache_N2Kbh: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        normed = self._normed(hidden_TD, weights.input_norm)
        qkv = weights.qkv(normed).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        rotate_(qkv[:, : num_heads + num_kv_heads], inputs.cos, inputs.sin)
        kv_T2Kh = qkv[:, num_heads:].view(-1, 2, num_kv_heads, config.head_dim)
        store(kv_T2Kh, cache_N2Kbh, inputs.plan)
        return attend(qkv[:, :num_heads], kv_T2Kh, cache_N2Kbh, inputs.plan).flatten(1)
