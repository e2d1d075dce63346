"""What every way of running the decoder's layers has in common: weights, a step's inputs, and the port.

Two passes exist: engine.model.plain_pass.PlainPass in plain torch, and engine.model.fused_pass.FusedPass
with kernels. They compute the same.

Shape suffixes: T tokens, R rows whose logits are needed, D hidden, V vocabulary, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from engine.kernels.choices import Choices
    from engine.kv_cache import KVCache
    from engine.kv_staging import StagedRows
    from engine.model.layer import LayerWeights

# Called with -1 and the embedding, then with each layer's number and the residual stream behind it: [T, D],
# behind the last layer [R, D].
Watch = Callable[[int, torch.Tensor], None]
# Called with the number of layers whose KV is in the cache, after each layer's store.
OnStored = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A decoder's tensors. embedding, head: [V, D], perhaps one tensor.  norm: [D] fp32.

    embedding_scale: what embeddings are multiplied with, in the weights' dtype, as the models were trained.
    """

    embedding: torch.Tensor
    embedding_scale: float
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step's layers share.

    output_rows: [R] int64, the batch's logits_rows, then its scored rows.
    angles: of each of the model's rotary embeddings, the cosines and sines of the tokens: [T, 1, h] fp32.
    plan: what the pass has planned for the step's attention.
    staged: where a pass with kernels stores KV a second time; None for nowhere.
    """

    token_ids: torch.Tensor
    output_rows: torch.Tensor
    angles: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    plan: Any
    staged: StagedRows | None = None


class ForwardPass(Protocol):
    """Computes a step's layers."""

    @property
    def choices(self) -> Choices | None:
        """What its kernels run with; None if it has none."""

    def plan(self, batch: ForwardBatch, block_size: int, device: torch.device) -> Any:
        """What does not hang on the layer, for StepInputs.plan."""

    def run(
        self,
        weights: DecoderWeights,
        inputs: StepInputs,
        cache: KVCache,
        *,
        watch: Watch | None = None,
        stored: OnStored | None = None,
    ) -> torch.Tensor:
        """Stores the new tokens' KV in the cache; returns [R, D] of output_rows behind the final norm."""
