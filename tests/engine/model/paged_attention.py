"""Sequences of random queries, keys and values in a paged cache full of NaN, for tests of attention.

exact_attention() is what to expect: a dense masked softmax in fp64, which knows no blocks, groups or corners.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.kv_cache import CacheShape, KVCache
from engine.model import attention
from engine.model.attention import AttentionPlan
from engine.model.plain_pass import AttentionCode
from tests.engine.sampling_arrays import arrays

# Neither the heads' default nor a power of two.
SCALE = 0.31


class PagedSequences:
    """Sequences of the given lengths: q [n, H, h], k and v [n, K, h] each. Change them before a step.

    dtype: of q, k and v.  cache_dtype: that of the cache, if it is another.  code: what computes.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 10,
        block_size: int = 4,
        layout: str = "HND",
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        code: AttentionCode = attention,
    ) -> None:
        self._code = code
        num_heads, num_kv_heads = heads
        generator = torch.Generator().manual_seed(sum(lengths))
        counts = [-(-length // block_size) for length in lengths]
        free = random.Random(3).sample(range(sum(counts) + 2), sum(counts) + 2)
        self.block_ids = [[free.pop() for _ in range(count)] for count in counts]
        self.q, self.k, self.v = (
            [torch.randn(length, count, head_dim, generator=generator).to(dtype) for length in lengths]
            for count in (num_heads, num_kv_heads, num_kv_heads)
        )
        shape = CacheShape(
            num_blocks=sum(counts) + 2,
            num_layers=2,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=cache_dtype or dtype,
            layout=layout,
        )
        cache = KVCache(shape)
        cache.data.fill_(torch.nan)
        self._layer = cache.layer(1)
        self._block_size = block_size

    def step(
        self, spans: Sequence[tuple[int, int]], windows: Sequence[int], *, wide_scores: bool = False
    ) -> dict[int, list[torch.Tensor]]:
        """Computes tokens first .. end of each sequence as one batch; those before are put in the cache.

        Returns of each window the outputs of each sequence, [end - first, H, h].
        """
        device = torch.device("cpu")
        plan = self._code.plan_attention(self._batch(spans), self._block_size, device, tuple(windows))
        for index, (first, _) in enumerate(spans):
            blocks, offsets = self._slots(index, 0, first)
            old = torch.stack([self.k[index][:first], self.v[index][:first]], dim=1)
            self._layer[blocks, :, :, offsets] = old.to(self._layer.dtype)
        q, k, v = (
            torch.cat([x[first:end] for x, (first, end) in zip(tensors, spans, strict=True)])
            for tensors in (self.q, self.k, self.v)
        )
        # As they lie behind one product for queries, keys and values.
        qkv = torch.cat([q, k, v], dim=1)
        kv_T2Kh = qkv[:, q.shape[1] :].unflatten(1, (2, -1))
        self._code.store(kv_T2Kh, self._layer, plan)
        counts = [end - first for first, end in spans]
        outputs = {
            window: self._code.attend(
                qkv[:, : q.shape[1]],
                kv_T2Kh,
                self._layer,
                plan,
                window=window,
                scale=SCALE,
                wide_scores=wide_scores,
            )
            for window in windows
        }
        return {window: list(output_THh.split(counts)) for window, output_THh in outputs.items()}

    def plan(self, spans: Sequence[tuple[int, int]], windows: Sequence[int]) -> AttentionPlan:
        """Of such a step."""
        device = torch.device("cpu")
        return AttentionPlan.build(self._batch(spans), self._block_size, device, windows=tuple(windows))

    def expected(self, index: int, first: int, end: int, window: int) -> torch.Tensor:
        """exact_attention() of tokens first .. end."""
        q, k, v = self.q[index], self.k[index], self.v[index]
        return exact_attention(q[first:end], k[:end], v[:end], window, SCALE)

    def _batch(self, spans: Sequence[tuple[int, int]]) -> ForwardBatch:
        tables = np.zeros((len(spans), max(map(len, self.block_ids))), np.int32)
        for row, block_ids in zip(tables, self.block_ids, strict=True):
            row[: len(block_ids)] = block_ids
        slots = []
        for index, (first, end) in enumerate(spans):
            blocks, offsets = self._slots(index, first, end)
            slots.append((blocks * self._block_size + offsets).numpy())
        counts = [end - first for first, end in spans]
        return ForwardBatch(
            step_id=1,
            token_ids=np.zeros(sum(counts), np.int64),
            positions=np.concatenate([np.arange(first, end) for first, end in spans]),
            slot_mapping=np.concatenate(slots),
            cu_seqlens_q=np.cumsum([0, *counts]).astype(np.int32),
            seq_lens=np.array([end for _, end in spans], np.int32),
            block_tables=tables,
            logits_rows=np.cumsum(counts) - 1,
            sampling=arrays(len(spans)),
        )

    def _slots(self, index: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(first, end)
        return torch.tensor(self.block_ids[index])[
            positions // self._block_size
        ], positions % self._block_size


def exact_attention(
    q_THh: torch.Tensor,
    k_CKh: torch.Tensor,
    v_CKh: torch.Tensor,
    window: int,
    scale: float,
    *,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Of the last T of C tokens, in fp64: [T, H, h]. Query head j reads kv head j // (H / K)."""
    num_new, context = len(q_THh), len(k_CKh)
    group = q_THh.shape[1] // k_CKh.shape[1]
    q, k, v = q_THh.double(), k_CKh.double(), v_CKh.double()
    scores = torch.einsum("thd,chd->htc", q, k.repeat_interleave(group, dim=1)) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    age = torch.arange(context - num_new, context)[:, None] - torch.arange(context)
    seen = (age >= 0) & (age < (window or context))
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    return torch.einsum("htc,chd->thd", weights, v.repeat_interleave(group, dim=1))
