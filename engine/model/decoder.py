"""The Llama-family decoder: embedding, layers, final norm and head, in plain torch.

Owns the weights. It knows the cache only as one strided view per layer, and neither
requests nor sampling.

    hidden += attention(rms_norm(hidden));  hidden += mlp(rms_norm(hidden))

The residual stream `hidden` is fp32 whatever the weights are; see docs/adr/0003.

Shape suffixes: T tokens, R rows whose logits are needed, D hidden, V vocabulary, C likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
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
    """What one step's layers share.

    output_rows: [R] int64, the batch's logits_rows, then its scored rows.
    cos, sin: [T, 1, h] fp32 rows of the rope table.
    """

    token_ids: torch.Tensor
    output_rows: torch.Tensor
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
        output_rows = batch.logits_rows
        if batch.scored is not None:
            output_rows = np.concatenate([output_rows, batch.scored.rows])
        return StepInputs(
            token_ids=torch.from_numpy(batch.token_ids).to(self.device),
            output_rows=torch.from_numpy(output_rows).to(self.device),
            cos=self._cos[positions][:, None],
            sin=self._sin[positions][:, None],
            plan=AttentionPlan.build(batch, block_size, self.device),
        )

    def forward(
        self,
        inputs: StepInputs,
        cache: KVCache,
        *,
        watch: Callable[[int, torch.Tensor], None] | None = None,
        stored: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Stores the new tokens' KV in the cache; returns what logits() takes, [R, D] of output_rows.

        watch: called with -1 and the embedding, then with each layer's number and the residual
            stream behind it: [T, D], behind the last layer [R, D].
        stored: called with the number of layers that store their KV in the cache, after each has.
        """
        hidden_TD = self._embedding[inputs.token_ids].float()
        if watch is not None:
            watch(-1, hidden_TD)
        last = len(self._layers) - 1
        for index, weights in enumerate(self._layers):
            attended = self._attention(hidden_TD, index, inputs, cache, stored)
            if index == last:
                # Only the rows whose logits are needed go through the rest of the last layer.
                hidden_TD, attended = hidden_TD[inputs.output_rows], attended[inputs.output_rows]
            hidden_TD = hidden_TD + weights.output(attended)
            normed = self._normed(hidden_TD, weights.mlp_norm)
            hidden_TD = hidden_TD + weights.down(silu_times_up(weights.gate_up(normed)))
            if watch is not None:
                watch(index, hidden_TD)
        return self._normed(hidden_TD, self._norm)

    def logits(self, normed_RD: torch.Tensor, scored_R: torch.Tensor | None = None) -> torch.Tensor:
        """[R, V] fp32 logits.

        A half-precision product rounds its result: bfloat16 knows steps of 0.125 at 25, which
        makes ties of likely tokens. The likeliest are therefore computed again, in fp32.

        scored_R: of each row a token whose logit is wanted in fp32 too, however unlikely it is.
        """
        logits_RV = functional.linear(normed_RD, self._head).float()
        if self.dtype == torch.float32:
            return logits_RV
        exact_RC = logits_RV.topk(min(REFINED, logits_RV.shape[1]), sorted=False).indices
        if scored_R is not None:
            exact_RC = torch.cat([exact_RC, scored_R[:, None]], dim=1)
        rows_RCD = self._head[exact_RC].float()
        refined_RC = torch.bmm(rows_RCD, normed_RD.float()[:, :, None])[:, :, 0]
        return logits_RV.scatter_(1, exact_RC, refined_RC)

    def _normed(self, hidden_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_TD, weight_D, self.config.rms_norm_eps).to(self.dtype)

    def _attention(
        self,
        hidden_TD: torch.Tensor,
        index: int,
        inputs: StepInputs,
        cache: KVCache,
        stored: Callable[[int], None] | None,
    ) -> torch.Tensor:
        config, weights, cache_N2Kbh = self.config, self._layers[index], cache.layer(index)
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        normed = self._normed(hidden_TD, weights.input_norm)
        qkv = weights.qkv(normed).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        rotate_(qkv[:, : num_heads + num_kv_heads], inputs.cos, inputs.sin)
        kv_T2Kh = qkv[:, num_heads:].view(-1, 2, num_kv_heads, config.head_dim)
        store(kv_T2Kh, cache_N2Kbh, inputs.plan)
        if stored is not None:
            stored(index + 1)
        return attend(qkv[:, :num_heads], kv_T2Kh, cache_N2Kbh, inputs.plan).flatten(1)
