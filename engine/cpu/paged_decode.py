"""Attention of sequences with one new token each, read from the cache where it lies.

PagedDecode is planned once per step and window; a layer then costs one call.

Shape suffixes: T tokens of the step, H query heads, K kv heads, h head_dim, B blocks of the cache, b
block_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from engine.cpu.attention_kernels import (
    PART,
    decode_kernel,
    floats_per_part,
    floats_per_thread,
)
from engine.cpu.team import float_bits, max_threads

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, Int64Array


@dataclass(frozen=True, slots=True)
class PagedDecode:
    """Parts of contexts, in the order of their sequences.

    tasks: [parts, 4] int64: row of the packed batch, sequence, first and end position.
    firsts: [sequences + 1] int64: where each sequence's parts begin.
    tables: the batch's [sequences, blocks] int32.
    """

    tasks: torch.Tensor
    firsts: torch.Tensor
    tables: torch.Tensor
    num_positions: int

    @classmethod
    def build(cls, batch: ForwardBatch, members: Int64Array, window: int) -> Self:
        """members: sequences of the batch with one new token.  window: keys that are seen; 0 is all."""
        ends = batch.seq_lens[members].astype(np.int64)
        begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        # A part is the same whatever the window and the batch: cuts are at multiples of its length.
        first_parts = begins // PART
        counts = -(-ends // PART) - first_parts
        firsts = np.concatenate([[0], np.cumsum(counts)])
        of = np.repeat(np.arange(len(members)), counts)
        part = np.arange(firsts[-1]) - firsts[of] + first_parts[of]
        tasks = np.stack(
            [
                batch.cu_seqlens_q[members].astype(np.int64)[of],
                members[of],
                np.maximum(part * PART, begins[of]),
                np.minimum((part + 1) * PART, ends[of]),
            ],
            axis=1,
        )
        return cls(
            tasks=torch.from_numpy(tasks),
            firsts=torch.from_numpy(firsts),
            tables=torch.from_numpy(np.ascontiguousarray(batch.block_tables)),
            num_positions=int((ends - begins).sum()),
        )

    def attend(
        self, q_THh: torch.Tensor, cache_B2Kbh: torch.Tensor, out_THh: torch.Tensor, scale: float
    ) -> None:
        """Fills these sequences' rows of out, which is contiguous; q: rows may lie apart."""
        _, num_heads, head_dim = q_THh.shape
        _, _, num_kv_heads, block_size, _ = cache_B2Kbh.shape
        block, pair, head, token, _ = cache_B2Kbh.stride()
        group = num_heads // num_kv_heads
        left = len(self.tasks) * num_kv_heads * floats_per_part(group, head_dim)
        room = torch.empty(left + max_threads() * floats_per_thread(group, head_dim), dtype=torch.float32)
        decode_kernel(q_THh.element_size(), head_dim, group)(
            2 * self.num_positions * num_kv_heads * head_dim,
            len(self.tasks),
            num_kv_heads,
            len(self.firsts) - 1,
            float_bits(scale),
            q_THh.data_ptr(),
            q_THh.stride(0),
            out_THh.data_ptr(),
            self.tables.data_ptr(),
            self.tables.shape[1],
            cache_B2Kbh.data_ptr(),
            block,
            pair,
            head,
            token,
            block_size,
            self.tasks.data_ptr(),
            self.firsts.data_ptr(),
            room.data_ptr(),
            room.data_ptr() + 4 * left,
        )
