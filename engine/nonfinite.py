"""Finds the layer in which a sequence's values first cease to be finite.

For debugging: runs a batch a second time and looks at every layer. The KV it stores is the
KV that is there already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import Int64Array

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from engine.kv_cache import KVCache
    from engine.model.decoder import Decoder


def sequences_of(batch: ForwardBatch, rows: Int64Array) -> Int64Array:
    """The sequences that rows of the packed batch belong to."""
    return np.searchsorted(batch.cu_seqlens_q, rows, side="right") - 1


class LayerSearch:
    """The search for one batch, on the engine thread."""

    def __init__(self, model: Decoder, cache: KVCache, batch: ForwardBatch) -> None:
        self._model = model
        self._cache = cache
        self._batch = batch
        self._inputs = model.prepare(batch, cache.shape.block_size)

    def places(self, sequences: set[int]) -> dict[int, str]:
        """Of each sequence, in words, where its values are first not finite."""
        places: dict[int, str] = {}

        def look(layer: int, hidden_RD: torch.Tensor) -> None:
            found = (sequences - places.keys()) & self._bad_sequences(layer, hidden_RD)
            places.update(dict.fromkeys(found, self._name(layer)))

        self._model.forward(self._inputs, self._cache, watch=look)
        # What no layer shows comes behind them.
        return dict.fromkeys(sequences, "the final norm or the output head") | places

    def _bad_sequences(self, layer: int, hidden_RD: torch.Tensor) -> set[int]:
        rows = np.arange(self._batch.num_tokens)
        if layer == self._model.config.num_layers - 1:
            rows = self._inputs.output_rows.cpu().numpy()
        is_bad = ~hidden_RD.isfinite().all(dim=-1).cpu().numpy()
        return set(sequences_of(self._batch, rows[is_bad]).tolist())

    def _name(self, layer: int) -> str:
        if layer < 0:
            return "the embedding"
        return f"layer {layer} of {self._model.config.num_layers}, counted from 0"
