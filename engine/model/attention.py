"""Attention over the paged cache, for a packed batch of whole prompts, chunks and decode tokens.

Everything that does not depend on the layer (gather indices, masks) is built once per step
in AttentionPlan; a layer then costs a handful of operators. A sequence never reads a slot
that holds no token of its own, so whatever lies in unused slots cannot reach an output.

Shape suffixes: T tokens, H heads, K kv heads, G = H / K, B sequences of a group, C context
positions, h head_dim; N blocks, b block_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.batch import BoolArray, ForwardBatch, Int64Array
from engine.model.blocked_attention import blocked_attention, scaled_product

# Sequences share one padded decode product while the longest has at most this many times the
# blocks of the shortest; padding then at most doubles the bytes that are read.
_MAX_PADDING = 2
# Below this many blocks another group costs more than its padding.
_FEW_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, of similar length, padded to C = blocks per sequence * b.

    rows: [B] their rows of the packed batch, or None if the batch is exactly this group.
    block_ids: [B * C / b]; a sequence's padding repeats its own first block.
    padding: [B, C] bool, True where there is no token.
    stale: flat positions (in B * C) that may hold foreign bytes; values there are zeroed,
        because a weight of 0 times NaN is NaN.
    """

    rows: torch.Tensor | None
    block_ids: torch.Tensor
    padding: torch.Tensor
    stale: torch.Tensor

    @classmethod
    def build(
        cls, batch: ForwardBatch, members: Int64Array, block_size: int, device: torch.device
    ) -> DecodeGroup:
        """members: [B] sequences of the batch, rising."""
        seq_lens = batch.seq_lens[members].astype(np.int64)
        num_blocks = -(-seq_lens // block_size)
        columns = np.arange(num_blocks.max())
        tables = batch.block_tables[members][:, : len(columns)].astype(np.int64)
        tables = np.where(columns < num_blocks[:, None], tables, tables[:, :1])
        positions = np.arange(len(columns) * block_size)
        padding = positions >= seq_lens[:, None]
        whole = len(members) == batch.num_tokens
        return cls(
            rows=None if whole else _to(batch.cu_seqlens_q[members].astype(np.int64), device),
            block_ids=_to(tables.reshape(-1), device),
            padding=_to(padding, device),
            stale=_to(np.flatnonzero(_stale(padding, seq_lens, num_blocks, block_size)), device),
        )


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Several new tokens of one sequence: rows start .. end of the packed batch.

    block_ids: the sequence's blocks, or None if the chunk is its beginning and attends to
        itself only.  seq_len: context including the chunk.
    """

    start: int
    end: int
    seq_len: int
    block_ids: torch.Tensor | None

    @classmethod
    def build(cls, batch: ForwardBatch, index: int, block_size: int, device: torch.device) -> PromptChunk:
        """index: which sequence of the batch."""
        start, end = (int(row) for row in batch.cu_seqlens_q[index : index + 2])
        seq_len, num_tokens = int(batch.seq_lens[index]), end - start
        if seq_len == num_tokens:
            return cls(start, end, seq_len, None)
        block_ids = batch.block_tables[index, : -(-seq_len // block_size)].astype(np.int64)
        return cls(start, end, seq_len, _to(block_ids, device))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step's sequences attend. blocks, offsets: [T] where each new token's KV is stored."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]

    @classmethod
    def build(cls, batch: ForwardBatch, block_size: int, device: torch.device) -> AttentionPlan:
        """Sorts the sequences of a batch into decode groups and prompt chunks."""
        num_new = np.diff(batch.cu_seqlens_q)
        single = np.flatnonzero(num_new == 1)
        num_blocks = -(-batch.seq_lens[single].astype(np.int64) // block_size)
        groups = [single[np.sort(part)] for part in _by_length(num_blocks)]
        return cls(
            blocks=_to(batch.slot_mapping // block_size, device),
            offsets=_to(batch.slot_mapping % block_size, device),
            groups=tuple(DecodeGroup.build(batch, members, block_size, device) for members in groups),
            chunks=tuple(
                PromptChunk.build(batch, int(index), block_size, device)
                for index in np.flatnonzero(num_new > 1)
            ),
        )


def store(kv_T2Kh: torch.Tensor, cache_N2Kbh: torch.Tensor, plan: AttentionPlan) -> None:
    """Writes the new tokens' keys and values into their slots of one layer."""
    cache_N2Kbh[plan.blocks, :, :, plan.offsets] = kv_T2Kh.to(cache_N2Kbh.dtype)


def attend(
    q_THh: torch.Tensor, kv_T2Kh: torch.Tensor, cache_N2Kbh: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """softmax(q k^T / sqrt(h)) v per sequence, causal: [T, H, h]. The new KV must be stored already."""
    out_THh = torch.empty_like(q_THh, memory_format=torch.contiguous_format)
    for chunk in plan.chunks:
        q_HTh = q_THh[chunk.start : chunk.end].transpose(0, 1)
        attended = _attend_chunk(q_HTh, kv_T2Kh, cache_N2Kbh, chunk)
        out_THh[chunk.start : chunk.end] = attended.transpose(0, 1)
    for group in plan.groups:
        if group.rows is None:
            return _attend_group(q_THh, cache_N2Kbh, group)
        out_THh[group.rows] = _attend_group(q_THh[group.rows], cache_N2Kbh, group)
    return out_THh


def _attend_chunk(
    q_HTh: torch.Tensor, kv_T2Kh: torch.Tensor, cache_N2Kbh: torch.Tensor, chunk: PromptChunk
) -> torch.Tensor:
    if chunk.block_ids is None:
        kv_2KCh = kv_T2Kh[chunk.start : chunk.end].permute(1, 2, 0, 3)
    else:
        kv_2KCh = _gather(cache_N2Kbh, chunk.block_ids)[:, :, : chunk.seq_len].to(q_HTh.dtype)
    if q_HTh.device.type == "cpu":
        q_KGTh = q_HTh.view(kv_2KCh.shape[1], -1, *q_HTh.shape[1:])
        return blocked_attention(q_KGTh, kv_2KCh[0], kv_2KCh[1]).flatten(0, 1)
    return fused_attention(q_HTh, kv_2KCh)


def fused_attention(q_HTh: torch.Tensor, kv_2KCh: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T of C positions by torch's fused operator; [H, T, h]."""
    num_new, context = q_HTh.shape[1], kv_2KCh.shape[2]
    mask = None
    if num_new < context:
        mask = torch.ones(num_new, context, dtype=torch.bool, device=q_HTh.device).tril_(context - num_new)
    return functional.scaled_dot_product_attention(
        q_HTh[None], kv_2KCh[:1], kv_2KCh[1:], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )[0]


def _attend_group(q_BHh: torch.Tensor, cache_N2Kbh: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
    # Fused attention is slow with one query per sequence; the G queries that share a kv head
    # make one small product per sequence and kv head instead.
    num_sequences, num_heads, head_dim = q_BHh.shape
    num_kv_heads = cache_N2Kbh.shape[2]
    kv_2KPh = _gather(cache_N2Kbh, group.block_ids).to(q_BHh.dtype)
    kv_2KPh[1].index_fill_(1, group.stale, 0)
    k_BCh, v_BCh = kv_2KPh.view(2, num_kv_heads * num_sequences, -1, head_dim)
    q_BGh = q_BHh.reshape(num_sequences, num_kv_heads, -1, head_dim)
    q_BGh = q_BGh.transpose(0, 1).reshape(len(k_BCh), -1, head_dim)
    scores_BGC = scaled_product(q_BGh, k_BCh.transpose(1, 2), head_dim**-0.5)
    by_sequence = scores_BGC.view(num_kv_heads, num_sequences, -1, scores_BGC.shape[-1])
    by_sequence.masked_fill_(group.padding[None, :, None], -torch.inf)
    # Exponentials and their sum are fp32 inside the operator.
    out_KBGh = torch.bmm(torch.softmax(scores_BGC, dim=-1), v_BCh).view(
        num_kv_heads, num_sequences, -1, head_dim
    )
    return out_KBGh.transpose(0, 1).reshape(num_sequences, num_heads, head_dim)


def _gather(cache_N2Kbh: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """[2, K, positions, h]: the tokens of the blocks, in order, contiguous in either layout."""
    blocks = cache_N2Kbh.permute(1, 2, 0, 3, 4).index_select(2, block_ids)
    return blocks.view(2, cache_N2Kbh.shape[2], -1, cache_N2Kbh.shape[4])


def _by_length(num_blocks: Int64Array) -> list[Int64Array]:
    """Indices grouped so that no group pads a sequence to more than _MAX_PADDING times its blocks."""
    groups: list[list[int]] = []
    limit = 0
    for index in np.argsort(num_blocks, kind="stable"):
        if not groups or num_blocks[index] > limit:
            groups.append([])
            limit = max(_MAX_PADDING * int(num_blocks[index]), _FEW_BLOCKS)
        groups[-1].append(int(index))
    return [np.array(group, np.int64) for group in groups]


def _stale(padding: BoolArray, seq_lens: Int64Array, num_blocks: Int64Array, block_size: int) -> BoolArray:
    # Padding repeats the first block: it holds only the sequence's own tokens once that is full.
    own = np.arange(padding.shape[1]) < (num_blocks * block_size)[:, None]
    return np.asarray(padding & (own | (seq_lens < block_size)[:, None]))


def _to(array: Int64Array | BoolArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
