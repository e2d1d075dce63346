"""Attention on CPUs: single new tokens read the cache in place, prompt chunks are what is faster here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.cpu import operators
from engine.cpu.paged_decode import PagedDecode
from engine.model.attention import PromptChunk, attend_chunk

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from engine.cpu.chunk_choice import ChunkChoice


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How one step's sequences attend in layers of one window. decode: None if none has one new token."""

    decode: PagedDecode | None
    chunks: tuple[PromptChunk, ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """How one step's sequences attend. slots: [T] int64, where each new token's KV is stored."""

    slots: torch.Tensor
    by_window: Mapping[int, WindowPlan]


class CpuAttention:
    """An engine.model.plain_pass.AttentionCode for tensors of one dtype, of the weights and of the cache.

    chunks: which way prompt chunks are computed.
    """

    def __init__(self, chunks: ChunkChoice) -> None:
        self._chunks = chunks

    def plan_attention(
        self, batch: ForwardBatch, block_size: int, device: torch.device, windows: tuple[int, ...]
    ) -> CpuPlan:
        """Of the batch; windows: the distinct windows of the model's layers."""
        num_new = np.diff(batch.cu_seqlens_q)
        single, several = np.flatnonzero(num_new == 1), np.flatnonzero(num_new > 1)
        fuses = self._chunks.fuses
        return CpuPlan(
            slots=torch.from_numpy(batch.slot_mapping),
            by_window={
                window: WindowPlan(
                    decode=PagedDecode.build(batch, single, window) if len(single) else None,
                    chunks=tuple(
                        PromptChunk.build(batch, int(index), block_size, device, window, fuses=fuses)
                        for index in several
                    ),
                )
                for window in windows
            },
        )

    def store(self, kv_T2Kh: torch.Tensor, cache_N2Kbh: torch.Tensor, plan: CpuPlan) -> None:
        """Writes the new tokens' keys and values into their slots of one layer."""
        operators.store(kv_T2Kh, cache_N2Kbh, plan.slots)

    def attend(
        self,
        q_THh: torch.Tensor,
        kv_T2Kh: torch.Tensor,
        cache_N2Kbh: torch.Tensor,
        plan: CpuPlan,
        *,
        window: int,
        scale: float,
        wide_scores: bool,
    ) -> torch.Tensor:
        """As engine.model.attention.attend(). The scores of single tokens are fp32 in any case."""
        of_window = plan.by_window[window]
        out_THh = torch.empty_like(q_THh, memory_format=torch.contiguous_format)
        for chunk in of_window.chunks:
            q_HTh = q_THh[chunk.start : chunk.end].transpose(0, 1)
            attended = attend_chunk(q_HTh, kv_T2Kh, cache_N2Kbh, chunk, scale=scale, wide_scores=wide_scores)
            out_THh[chunk.start : chunk.end] = attended.transpose(0, 1)
        if of_window.decode is not None:
            of_window.decode.attend(q_THh, cache_N2Kbh, out_THh, scale)
        return out_THh
