"""The decoder's layers operator by operator: in plain torch, or with other code for their parts (engine/cpu).

Shape suffixes: T tokens, R rows whose logits are needed, D hidden, A attended, b block_size, h head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.model import attention as plain_attention
from engine.model import layer as eager_layer
from engine.model.layers import rms_norm

if TYPE_CHECKING:
    from baton.model_config import ModelConfig
    from engine.batch import ForwardBatch
    from engine.kv_cache import KVCache
    from engine.model.forward_pass import DecoderWeights, OnStored, StepInputs, Watch
    from engine.model.layer import LayerCode, LayerWeights


class AttentionCode(Protocol):
    """What computes attention: the module engine.model.attention, or an engine.cpu.attention.CpuAttention."""

    def plan_attention(
        self, batch: ForwardBatch, block_size: int, device: torch.device, windows: tuple[int, ...]
    ) -> Any:
        """What does not hang on the layer."""

    def store(self, kv_T2Kh: torch.Tensor, cache_N2Kbh: torch.Tensor, plan: Any) -> None:
        """Writes the new tokens' keys and values into their slots of one layer."""

    def attend(
        self,
        q_THh: torch.Tensor,
        kv_T2Kh: torch.Tensor,
        cache_N2Kbh: torch.Tensor,
        plan: Any,
        *,
        window: int,
        scale: float,
        wide_scores: bool,
    ) -> torch.Tensor:
        """As engine.model.attention.attend()."""


class PlainPass:
    """An engine.model.forward_pass.ForwardPass.

    layer_code: what computes a layer around its attention.  attention_code: what computes that.
    Both are plain torch unless told otherwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_code: LayerCode = eager_layer,
        attention_code: AttentionCode = plain_attention,
    ) -> None:
        self._config = config
        self.layer_code = layer_code
        self.attention_code = attention_code

    @property
    def choices(self) -> None:
        """It has no kernels."""

    def plan(self, batch: ForwardBatch, block_size: int, device: torch.device) -> Any:
        """Of the batch's attention."""
        return self.attention_code.plan_attention(batch, block_size, device, self._config.windows)

    def run(
        self,
        weights: DecoderWeights,
        inputs: StepInputs,
        cache: KVCache,
        *,
        watch: Watch | None = None,
        stored: OnStored | None = None,
    ) -> torch.Tensor:
        """As ForwardPass.run()."""
        hidden_TD = weights.embedding[inputs.token_ids].float() * weights.embedding_scale
        if watch is not None:
            watch(-1, hidden_TD)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended_TA = self._attention(hidden_TD, layer, inputs, cache, index=index, stored=stored)
            if index == last:
                # Only the rows whose logits are needed go through the rest of the last layer.
                hidden_TD, attended_TA = hidden_TD[inputs.output_rows], attended_TA[inputs.output_rows]
            hidden_TD = self.layer_code.finish(hidden_TD, attended_TA, layer, self._config)
            if watch is not None:
                watch(index, hidden_TD)
        return rms_norm(hidden_TD, weights.norm, self._config.rms_norm_eps).to(weights.head.dtype)

    def _attention(
        self,
        hidden_TD: torch.Tensor,
        weights: LayerWeights,
        inputs: StepInputs,
        cache: KVCache,
        *,
        index: int,
        stored: OnStored | None,
    ) -> torch.Tensor:
        """[T, heads * head_dim]: what the new tokens read from the cache, which has their own KV by then."""
        config, cache_N2Kbh = self._config, cache.layer(index)
        layer, num_heads = config.layers[index], config.num_heads
        qkv = self.layer_code.project(hidden_TD, weights, config, *inputs.angles[layer.rope])
        kv_T2Kh = qkv[:, num_heads:].view(-1, 2, config.num_kv_heads, config.head_dim)
        self.attention_code.store(kv_T2Kh, cache_N2Kbh, inputs.plan)
        if stored is not None:
            stored(index + 1)
        attended_THh = self.attention_code.attend(
            qkv[:, :num_heads],
            kv_T2Kh,
            cache_N2Kbh,
            inputs.plan,
            window=layer.window,
            scale=config.attention_scale,
            # A bias on the keys may lift all scores of a query alike, by thousands, where half-precision
            # steps are larger than what tells keys apart. Softmax would take it away, but too late.
            wide_scores=config.attention_bias and qkv.dtype != torch.float32,
        )
        return attended_THh.flatten(1)
