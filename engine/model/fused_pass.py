"""The decoder's layers with fused kernels: where the device is a GPU.

    first layer   embed_rms_norm_qkv; the others add_rms_norm, then the product with qkv
    attention     rope_store_kv; paged_attention for up to 8 new tokens, prefill_attention for more
    MLP           add_rms_norm, products, gated_activation

The residual stream is fp32 and changed in place; what a layer adds to it last is added by the next layer's
norm. Computes what engine.model.plain_pass.PlainPass does. Below the number of tokens that was measured on
the device, the vendor's product and attention take the place of two kernels (Choices.uses_kernel).

Shape suffixes: T tokens, R rows whose logits are needed, D hidden, N heads of q, k and v, A attended,
h head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from engine.kernels.add_rms_norm import add_rms_norm
from engine.kernels.contests import EMBED_RMS_NORM_QKV, PREFILL_ATTENTION
from engine.kernels.embed_rms_norm_qkv import embed_rms_norm_qkv
from engine.kernels.gated_activation import gated_activation
from engine.kernels.paged_attention import MAX_NEW_TOKENS, paged_attention
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.rope_store_kv import rope_store_kv
from engine.kernels.sequences import Sequences
from engine.model.attention import fused_attention
from engine.model.layer import Mlp
from engine.upload import uploaded

if TYPE_CHECKING:
    from baton.model_config import ModelConfig
    from engine.batch import BoolArray, ForwardBatch, Int64Array
    from engine.kernels.choices import Choices
    from engine.kv_cache import KVCache
    from engine.model.forward_pass import DecoderWeights, OnStored, StepInputs, Watch
    from engine.model.layer import LayerWeights
    from engine.model.moe import Experts


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """A step's attention. slots: [T] int64.  few: sequences of up to 8 new tokens.  many: of more.

    short: rows of the step's only prompt, if torch's fused attention computes it faster. Of several prompts,
        each would be a launch of its own.
    """

    slots: torch.Tensor
    few: Sequences | None
    many: Sequences | None
    short: slice | None


class FusedPass:
    """An engine.model.forward_pass.ForwardPass."""

    def __init__(self, config: ModelConfig, choices: Choices) -> None:
        self._config = config
        self.choices = choices

    def plan(self, batch: ForwardBatch, block_size: int, device: torch.device) -> FusedPlan:  # noqa: ARG002
        """Sorts the sequences by their new tokens."""
        num_new = np.diff(batch.cu_seqlens_q)
        is_few = (num_new > 0) & (num_new <= MAX_NEW_TOKENS)
        is_many = num_new > MAX_NEW_TOKENS
        short = self._short(batch, np.flatnonzero(is_many))

        def those(chosen: BoolArray) -> Sequences | None:
            members = np.flatnonzero(chosen)
            return Sequences.of(batch, members, device) if len(members) else None

        return FusedPlan(
            slots=uploaded(batch.slot_mapping, device),
            few=those(is_few),
            many=those(is_many) if short is None else None,
            short=short,
        )

    def _short(self, batch: ForwardBatch, prompts: Int64Array) -> slice | None:
        """Rows of the prompt that is computed without a kernel; prompts: those of the step."""
        if len(prompts) != 1:
            return None
        index = int(prompts[0])
        start, end = batch.cu_seqlens_q[index : index + 2].tolist()
        num_tokens = end - start
        most = min((window for window in self._config.windows if window), default=num_tokens)
        is_whole = num_tokens == batch.seq_lens[index]
        if not is_whole or num_tokens > most or self.choices.uses_kernel(PREFILL_ATTENTION, num_tokens):
            return None
        return slice(start, end)

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
        hidden_TD, qkv_TO = self._first(weights, inputs.token_ids)
        if watch is not None:
            watch(-1, hidden_TD)
        last = len(weights.layers) - 1
        delta_TD: torch.Tensor | None = None
        delta_norm_D: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            if index:
                normed_TD = self._add(hidden_TD, delta_TD, layer.input_norm, delta_norm_D, weights)
                qkv_TO = layer.qkv(normed_TD)
            attended_TA = self._attention(qkv_TO, layer, inputs, cache, index=index, stored=stored)
            if index == last:
                # Only the rows whose logits are needed go through the rest of the last layer.
                hidden_TD, attended_TA = hidden_TD[inputs.output_rows], attended_TA[inputs.output_rows]
            out_TD = layer.output(attended_TA)
            normed_TD = self._add(hidden_TD, out_TD, layer.mlp_norm, layer.attention_out_norm, weights)
            delta_TD, delta_norm_D = self._mlp(layer.mlp, normed_TD), layer.mlp_out_norm
            if watch is not None:
                watch(index, hidden_TD + self._alone(delta_TD, delta_norm_D))
        return self._add(hidden_TD, delta_TD, weights.norm, delta_norm_D, weights)

    def _first(self, weights: DecoderWeights, token_ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding, [T, D] fp32, and the first layer's q, k and v, not rotated yet."""
        first = weights.layers[0]
        if self.choices.uses_kernel(EMBED_RMS_NORM_QKV, len(token_ids_T)):
            return embed_rms_norm_qkv(
                token_ids_T,
                weights.embedding,
                first.input_norm,
                self._config.rms_norm_eps,
                first.qkv.weight,
                first.qkv.bias,
                embedding_scale=weights.embedding_scale,
                choices=self.choices,
            )
        hidden_TD = weights.embedding[token_ids_T].float() * weights.embedding_scale
        return hidden_TD, first.qkv(self._add(hidden_TD, None, first.input_norm, None, weights))

    def _attention(
        self,
        qkv_TO: torch.Tensor,
        weights: LayerWeights,
        inputs: StepInputs,
        cache: KVCache,
        *,
        index: int,
        stored: OnStored | None,
    ) -> torch.Tensor:
        """[T, heads * head_dim]."""
        config, plan, staged, cache_N2Kbh = self._config, inputs.plan, inputs.staged, cache.layer(index)
        layer, num_heads = config.layers[index], config.num_heads
        qkv_TNh = qkv_TO.view(len(qkv_TO), -1, config.head_dim)
        # A short prompt reads the new keys and values here, as they are in the cache.
        shape = (len(qkv_TO), 2, config.num_kv_heads, config.head_dim)
        kv_T2Kh = qkv_TO.new_empty(shape) if plan.short is not None else None
        rope_store_kv(
            qkv_TNh,
            *inputs.angles[layer.rope],
            cache_N2Kbh,
            plan.slots,
            num_heads=num_heads,
            head_norm_Nh=weights.head_norm,
            eps=config.rms_norm_eps,
            rows_T2Kh=kv_T2Kh,
            stage_N2Kbh=None if staged is None else staged.step.layers_Ln2Kbh[index],
            stage_slots_T=None if staged is None else staged.slots,
            choices=self.choices,
        )
        if stored is not None:
            stored(index + 1)
        q_THh = qkv_TNh[:, :num_heads]
        out_THh = torch.empty(q_THh.shape, dtype=q_THh.dtype, device=q_THh.device)
        for attention, sequences in ((paged_attention, plan.few), (prefill_attention, plan.many)):
            if sequences is not None:
                attention(
                    q_THh,
                    cache_N2Kbh,
                    sequences,
                    out_THh,
                    scale=config.attention_scale,
                    window=layer.window,
                    choices=self.choices,
                )
        if kv_T2Kh is not None:
            rows = plan.short
            kv_2KTh = kv_T2Kh[rows].permute(1, 2, 0, 3)
            q_HTh = q_THh[rows].transpose(0, 1)
            attended = fused_attention(q_HTh, kv_2KTh, None, scale=config.attention_scale)
            out_THh[rows] = attended.transpose(0, 1)
        return out_THh.flatten(1)

    def _mlp(self, mlp: Mlp | Experts, x_TD: torch.Tensor) -> torch.Tensor:
        if not isinstance(mlp, Mlp):
            return mlp(x_TD)
        return mlp.down(gated_activation(mlp.gate_up(x_TD), mlp.activation, choices=self.choices))

    def _add(
        self,
        hidden_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        norm_D: torch.Tensor,
        delta_norm_D: torch.Tensor | None,
        weights: DecoderWeights,
    ) -> torch.Tensor:
        """Adds delta to hidden in place; returns the norm of that in the weights' dtype."""
        return add_rms_norm(
            hidden_TD,
            delta_TD,
            norm_D,
            self._config.rms_norm_eps,
            delta_weight_D=delta_norm_D,
            dtype=weights.head.dtype,
            choices=self.choices,
        )

    def _alone(self, delta_TD: torch.Tensor, norm_D: torch.Tensor | None) -> torch.Tensor:
        """What a layer adds last, for those who watch."""
        if norm_D is None:
            return delta_TD.float()
        return functional.rms_norm(delta_TD.float(), norm_D.shape, norm_D, self._config.rms_norm_eps)
