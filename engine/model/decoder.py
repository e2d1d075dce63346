"""The decoder: embedding, layers, final norm and head, for every family.

Owns the weights. It knows the cache only as one strided view per layer, and neither requests nor
sampling. Its layers are computed by a ForwardPass, of which there are two; the families differ only in
baton.model_config.ModelConfig and in which weights a layer has.

Shape suffixes: R rows whose logits are needed, D hidden, V vocabulary, C likeliest tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.likeliest import candidates
from engine.model.forward_pass import DecoderWeights, ForwardPass, OnStored, StepInputs, Watch
from engine.model.layer import Projection
from engine.model.packed import packed
from engine.model.plain_pass import PlainPass
from engine.model.rope import Rope
from engine.upload import uploaded

if TYPE_CHECKING:
    from baton.model_config import ModelConfig
    from engine.batch import ForwardBatch
    from engine.kv_cache import KVCache
    from engine.kv_staging import StagedRows


# Logits per row that are computed again in fp32. A token that matters and is not among them would have
# to be misjudged by more than a rounding step.
REFINED = 64


class Decoder:
    """A decoder on one device. Weights never change.

    packs: the head is packed for its product, beside the rows that are looked up (engine.model.packed).
    forward_pass: what computes its layers; it may be replaced between steps.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, *, packs: bool = False) -> None:
        self.config = config
        self.weights = weights
        self._head = Projection(weight=packed(weights.head) if packs else weights.head)
        self.forward_pass: ForwardPass = PlainPass(config)
        self._ropes = [Rope(rope, config.head_dim, config.rope_steps, self.device) for rope in config.ropes]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and computation."""
        return self.weights.embedding.dtype

    def prepare(self, batch: ForwardBatch, block_size: int, staged: StagedRows | None = None) -> StepInputs:
        """Brings a batch to the device and builds everything that no layer changes."""
        positions = uploaded(batch.positions, self.device)
        steps = None
        if batch.rope_steps is not None:
            steps = uploaded(batch.rope_steps, self.device)
        output_rows = batch.logits_rows
        if batch.scored is not None:
            output_rows = np.concatenate([output_rows, batch.scored.rows])
        return StepInputs(
            token_ids=uploaded(batch.token_ids, self.device),
            output_rows=uploaded(output_rows, self.device),
            angles=tuple(rope.rows(positions, steps) for rope in self._ropes),
            plan=self.forward_pass.plan(batch, block_size, self.device),
            staged=staged,
        )

    def forward(
        self,
        inputs: StepInputs,
        cache: KVCache,
        *,
        watch: Watch | None = None,
        stored: OnStored | None = None,
    ) -> torch.Tensor:
        """Stores the new tokens' KV in the cache; returns what logits() takes, [R, D] of output_rows.

        watch, stored: see engine.model.forward_pass.
        """
        return self.forward_pass.run(self.weights, inputs, cache, watch=watch, stored=stored)

    def logits(self, normed_RD: torch.Tensor, scored_R: torch.Tensor | None = None) -> torch.Tensor:
        """[R, V] fp32 logits.

        A half-precision product rounds its result: bfloat16 knows steps of 0.125 at 25, which
        makes ties of likely tokens. The likeliest are therefore computed again, in fp32.

        scored_R: of each row a token whose logit is wanted in fp32 too, however unlikely it is.
        """
        logits_RV = self._head(normed_RD).float()
        if self.dtype == torch.float32:
            return logits_RV
        exact_RC = candidates(logits_RV, REFINED)
        if scored_R is not None:
            exact_RC = torch.cat([exact_RC, scored_R[:, None]], dim=1)
        rows_RCD = self.weights.head[exact_RC].float()
        refined_RC = torch.bmm(rows_RCD, normed_RD.float()[:, :, None])[:, :, 0]
        return logits_RV.scatter_(1, exact_RC, refined_RC)
