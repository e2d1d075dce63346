"""A second place for what a step stores, in the order in which it is sent.

Owns the memory, and which blocks of the cache a step leaves there as well. The kernel that stores KV in the
cache writes there in the same pass (engine/kernels/rope_store_kv.py). Whoever sends KV layer by layer then
finds the blocks of one layer side by side, and copies them without gathering them from the cache first.

    cache     block 7: layer 0, 1, 2 ...   block 2: layer 0, 1, 2 ...       a block is one run of bytes
    stage     layer 0: blocks 7, 2 ...     layer 1: blocks 7, 2 ...         a layer is

A stage is written again a few steps later, and nobody waits for those who read it. So a reader asks
is_intact() once it has its copy, and takes the cache if that says no: the cache has the same until the blocks
are given back.

Shape suffixes: T tokens, L layers, n blocks of a stage, K kv heads, b block_size, h head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.errors import ConfigError
from engine.kv_cache import available_bytes
from engine.upload import uploaded

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, Int64Array
    from engine.kv_cache import CacheShape

# A stage is read while the next step is computed, and that step has a stage of its own.
NUM_STAGES = 2


class StagedStep:
    """One step's part of a stage. layers_Ln2Kbh: its memory, strided as the cache's layout demands."""

    def __init__(self, stage: _Stage, generation: int, places: dict[int, int]) -> None:
        self.layers_Ln2Kbh = stage.layers_Ln2Kbh
        self._stage = stage
        self._generation = generation
        self._places = places

    @property
    def is_intact(self) -> bool:
        """Whether no later step has begun to write here.

        What was copied off the device before this was asked is right, if the answer is yes.
        """
        return self._stage.generation == self._generation

    def find(self, block_ids: Sequence[int]) -> slice | None:
        """Where blocks of the cache lie in the stage; None unless all do, side by side and in this order."""
        first = self._places.get(block_ids[0]) if block_ids else None
        if first is None:
            return None
        if any(self._places.get(id_) != first + index for index, id_ in enumerate(block_ids)):
            return None
        return slice(first, first + len(block_ids))


@dataclass(frozen=True, slots=True)
class StagedRows:
    """For the kernels. slots: [T] int64, where in the stage each token of a step goes; -1 for nowhere."""

    step: StagedStep
    slots: torch.Tensor


class KvStaging:
    """The stages of one engine, on the cache's device. Used on the engine's thread, but for StagedStep.

    shape: the cache's; its number of blocks does not matter.  max_tokens: most that a step stores.
    Raises ConfigError where there is no memory for them.
    """

    def __init__(
        self, shape: CacheShape, max_tokens: int, device: torch.device | str, *, num_stages: int = NUM_STAGES
    ) -> None:
        self._block_size = shape.block_size
        self._num_blocks = max_tokens // shape.block_size + 1
        stage = shape.with_blocks(self._num_blocks)
        _check_memory(num_stages * stage.num_bytes, torch.device(device))
        self._stages = [_Stage(stage, device) for _ in range(num_stages)]
        self._next = 0

    def begin(self, batch: ForwardBatch, min_new_tokens: int) -> StagedRows | None:
        """Takes the oldest stage for a step. To be called before the step's first kernel is launched.

        Of sequences that the step completes, with at least so many new tokens, the blocks that it fills from
        their first slot on are staged, as many as there is room for. None if there are none.
        """
        places: dict[int, int] = {}
        slots_T = np.full(batch.num_tokens, -1, np.int64)
        num_new_B = np.diff(batch.cu_seqlens_q)
        ends = np.isin(batch.cu_seqlens_q[1:] - 1, batch.logits_rows)
        for index in np.flatnonzero(ends & (num_new_B >= min_new_tokens)):
            self._add(batch, int(index), places, slots_T)
        if not places:
            return None
        stage = self._stages[self._next]
        self._next = (self._next + 1) % len(self._stages)
        stage.generation += 1
        step = StagedStep(stage, stage.generation, places)
        return StagedRows(step, uploaded(slots_T, stage.layers_Ln2Kbh.device))

    def _add(self, batch: ForwardBatch, index: int, places: dict[int, int], slots_T: Int64Array) -> None:
        size = self._block_size
        first_row, end_row = batch.cu_seqlens_q[index : index + 2].tolist()
        end = int(batch.seq_lens[index])
        start = end - (end_row - first_row)
        first_block, end_block = -(-start // size), -(-end // size)
        if first_block == end_block or len(places) + end_block - first_block > self._num_blocks:
            return
        offset = len(places) * size - first_block * size
        rows = slice(first_row + first_block * size - start, end_row)
        slots_T[rows] = batch.positions[rows] + offset
        block_ids = batch.block_tables[index, first_block:end_block].tolist()
        places.update(zip(block_ids, range(len(places), len(places) + len(block_ids)), strict=True))


class _Stage:
    """Memory. generation: rises with each step that writes here."""

    def __init__(self, shape: CacheShape, device: torch.device | str) -> None:
        num_blocks, num_layers, *block = shape.physical
        memory = torch.empty(num_layers, num_blocks, *block, dtype=shape.dtype, device=device).zero_()
        self.layers_Ln2Kbh = memory.transpose(3, 4) if shape.layout == "NHD" else memory
        self.generation = 0


def _check_memory(num_bytes: int, device: torch.device) -> None:
    available = available_bytes(device)
    if available is not None and num_bytes > available:
        raise ConfigError(
            f"staging KV needs {num_bytes} bytes on {device}, but only {available} are free; set "
            f"kv_cache_bytes or max_batch_tokens to less, or kv_staging to false",
            field="kv_staging",
        )
