"""What a prefill worker's engine does to its stage (engine/kv_staging.py), without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.kv_staging import KvStaging, StagedRows
from tests.engine.sampling_arrays import arrays


class StagedPrompt:
    """The last step of a prompt: the tokens from start to end, in blocks of a cache on the CPU.

    rows: None if there is nothing to stage.
    """

    def __init__(
        self, staging: KvStaging, cache: KVCache, block_ids: Sequence[int], start: int, end: int
    ) -> None:
        self._cache = cache
        self._batch = _batch(block_ids, start, end, cache.shape.block_size)
        self.rows: StagedRows | None = staging.begin(self._batch, 1)

    def store(self, layers: slice) -> None:
        """Copies what the cache has in some layers to the stage, unless a later step has taken that."""
        if self.rows is None or not self.rows.step.is_intact:
            return
        size = self._cache.shape.block_size
        to_T, from_T = self.rows.slots, torch.from_numpy(self._batch.slot_mapping)
        is_staged_T = to_T >= 0
        to_T, from_T = to_T[is_staged_T], from_T[is_staged_T]
        tokens = self._cache.logical[from_T // size, layers, :, :, from_T % size]
        stage = self.rows.step.layers_Ln2Kbh.transpose(0, 1)
        stage[to_T // size, layers, :, :, to_T % size] = tokens


def _batch(block_ids: Sequence[int], start: int, end: int, block_size: int) -> ForwardBatch:
    positions = np.arange(start, end)
    table = np.array([block_ids], np.int32)
    return ForwardBatch(
        step_id=0,
        token_ids=np.zeros(end - start, np.int64),
        positions=positions,
        slot_mapping=table[0].astype(np.int64)[positions // block_size] * block_size + positions % block_size,
        cu_seqlens_q=np.array([0, end - start], np.int32),
        seq_lens=np.array([end], np.int32),
        block_tables=table,
        logits_rows=np.array([end - start - 1]),
        sampling=arrays(1),
    )
