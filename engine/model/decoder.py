"""The decoder: embedding, layers, final norm and head, in plain torch, for every family.

Owns the weights. It knows the cache only as one strided view per layer, and neither requests nor
sampling. What a layer computes around its attention is engine/model/layer.py's; the families differ only
in baton.model_config.ModelConfig and in which weights a layer has.

Shape suffixes: T tokens, R rows whose logits are needed, D hidden, V vocabulary, C likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from engine.model import layer as eager_layer
from engine.model.attention import AttentionPlan, attend, store
from engine.model.layers import rms_norm
from engine.model.rope import Rope

if TYPE_CHECKING:
    from baton.model_config import ModelConfig
    from engine.batch import ForwardBatch
    from engine.kv_cache import KVCache
    from engine.model.layer import LayerCode, LayerWeights


# Logits per row that are computed again in fp32. A token that matters and is not among them would have
# to be misjudged by more than a rounding step.
REFINED = 64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step's layers share.

    output_rows: [R] int64, the batch's logits_rows, then its scored rows.
    angles: of each of the model's rotary embeddings, the cosines and sines of the tokens: [T, 1, h] fp32.
    """

    token_ids: torch.Tensor
    output_rows: torch.Tensor
    angles: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    plan: AttentionPlan


class Decoder:
    """A decoder on one device. Weights never change.

    layer_code: what computes its layers; it may be replaced between steps.
    """

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
        self.layer_code: LayerCode = eager_layer
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._ropes = [Rope(rope, config.head_dim, config.rope_steps, self.device) for rope in config.ropes]
        # In the weights' dtype, as the models were trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        # A bias on the keys may lift all scores of a query alike, by thousands, where half-precision steps
        # are larger than what tells keys apart. Softmax would take it away, but too late.
        self._wide_scores = config.attention_bias and self.dtype != torch.float32

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
        steps = None
        if batch.rope_steps is not None:
            steps = torch.from_numpy(batch.rope_steps).to(self.device)
        output_rows = batch.logits_rows
        if batch.scored is not None:
            output_rows = np.concatenate([output_rows, batch.scored.rows])
        return StepInputs(
            token_ids=torch.from_numpy(batch.token_ids).to(self.device),
            output_rows=torch.from_numpy(output_rows).to(self.device),
            angles=tuple(rope.rows(positions, steps) for rope in self._ropes),
            plan=AttentionPlan.build(batch, block_size, self.device, self.config.windows),
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
        hidden_TD = self._embedding[inputs.token_ids].float() * self._embedding_scale
        if watch is not None:
            watch(-1, hidden_TD)
        last = len(self._layers) - 1
        for index, weights in enumerate(self._layers):
            attended_TA = self._attention(hidden_TD, index, inputs, cache, stored)
            if index == last:
                # Only the rows whose logits are needed go through the rest of the last layer.
                hidden_TD, attended_TA = hidden_TD[inputs.output_rows], attended_TA[inputs.output_rows]
            hidden_TD = self.layer_code.finish(hidden_TD, attended_TA, weights, self.config)
            if watch is not None:
                watch(index, hidden_TD)
        return rms_norm(hidden_TD, self._norm, self.config.rms_norm_eps).to(self.dtype)

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

    def _attention(
        self,
        hidden_TD: torch.Tensor,
        index: int,
        inputs: StepInputs,
        cache: KVCache,
        stored: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """[T, heads * head_dim]: what the new tokens read from the cache, which has their own KV by then."""
        config, cache_N2Kbh = self.config, cache.layer(index)
        layer, num_heads = config.layers[index], config.num_heads
        qkv = self.layer_code.project(hidden_TD, self._layers[index], config, *inputs.angles[layer.rope])
        kv_T2Kh = qkv[:, num_heads:].view(-1, 2, config.num_kv_heads, config.head_dim)
        store(kv_T2Kh, cache_N2Kbh, inputs.plan)
        if stored is not None:
            stored(index + 1)
        attended_THh = attend(
            qkv[:, :num_heads],
            kv_T2Kh,
            cache_N2Kbh,
            inputs.plan,
            window=layer.window,
            scale=config.attention_scale,
            wide_scores=self._wide_scores,
        )
        return attended_THh.flatten(1)
