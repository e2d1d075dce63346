"""Attention over the paged cache, for a packed batch of whole prompts, chunks and decode tokens.

    out[i] = softmax(scale * q[i] k[j]^T) v[j]  over  max(0, i - window + 1) <= j <= i

A window counts the keys that a query sees, its own among them; window 0 sees all.

Everything that does not depend on the layer (gather indices, masks) is built once per step
in AttentionPlan, once for each distinct window of the model's layers; a layer then costs a
handful of operators. A sequence never reads a slot that holds no token of its own, so
whatever lies in unused slots cannot reach an output.

The cache keeps the blocks outside a window: a block holds all layers, and a layer with
another window may still read it. A window saves reading, not memory.

Shape suffixes: T tokens, H heads, K kv heads, G = H / K, B sequences of a group, C context
positions, h head_dim; N blocks, b block_size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.batch import BoolArray, ForwardBatch, Int64Array
from engine.model.blocked_attention import blocked_attention, scaled_product
from engine.model.kv_range import narrowed
from engine.upload import uploaded

# Sequences share one padded decode product while the longest has at most this many times the
# blocks of the shortest; padding then at most doubles the bytes that are read.
_MAX_PADDING = 2
# Below this many blocks another group costs more than its padding.
_FEW_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class ContextSpan:
    """The blocks that some sequences' new tokens see: from that of the first key seen to the last.

    first_block: [B] column of the block table.  num_blocks: [B].
    length: [B] tokens in these blocks.  hidden: [B] tokens at their beginning that nobody sees.
    """

    first_block: Int64Array
    num_blocks: Int64Array
    length: Int64Array
    hidden: Int64Array

    @classmethod
    def of(cls, batch: ForwardBatch, members: Int64Array, block_size: int, window: int) -> ContextSpan:
        """members: [B] sequences of the batch."""
        seq_lens = batch.seq_lens[members].astype(np.int64)
        first = np.zeros_like(seq_lens)
        if window:
            num_new = np.diff(batch.cu_seqlens_q)[members]
            first = np.maximum(seq_lens - num_new - window + 1, 0)
        first_block = first // block_size
        return cls(
            first_block=first_block,
            num_blocks=-(-seq_lens // block_size) - first_block,
            length=seq_lens - first_block * block_size,
            hidden=first - first_block * block_size,
        )


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, of similar spans, padded to C = blocks per sequence * b.

    rows: [B] their rows of the packed batch, or None if the batch is exactly this group.
    block_ids: [B * C / b]; a sequence's padding repeats the first block of its span.
    masked: [B, C] bool, True where there is no token that the sequence sees.
    stale: flat positions (in B * C) that may hold foreign bytes; values there are zeroed,
        because a weight of 0 times NaN is NaN.
    """

    rows: torch.Tensor | None
    block_ids: torch.Tensor
    masked: torch.Tensor
    stale: torch.Tensor

    @classmethod
    def build(
        cls, batch: ForwardBatch, members: Int64Array, block_size: int, device: torch.device, window: int
    ) -> DecodeGroup:
        """members: [B] sequences of the batch, rising."""
        span = ContextSpan.of(batch, members, block_size, window)
        steps = np.arange(span.num_blocks.max())
        columns = span.first_block[:, None] + np.where(steps < span.num_blocks[:, None], steps, 0)
        tables = batch.block_tables[members[:, None], columns].astype(np.int64)
        positions = np.arange(len(steps) * block_size)
        padding = positions >= span.length[:, None]
        whole = len(members) == batch.num_tokens
        return cls(
            rows=None if whole else uploaded(batch.cu_seqlens_q[members].astype(np.int64), device),
            block_ids=uploaded(tables.reshape(-1), device),
            masked=uploaded(padding | (positions < span.hidden[:, None]), device),
            stale=uploaded(np.flatnonzero(_stale(padding, span, block_size)), device),
        )


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Several new tokens of one sequence: rows start .. end of the packed batch.

    context: positions that are read, the chunk's own among them, from the first block that its
        first query sees.
    window: 0 where it hides nothing.
    block_ids: the blocks of the context, or None if the chunk is the sequence's beginning and
        attends to itself only.
    is_fused: computed by torch's fused operator.  mask: what that needs of causal_mask().
    """

    start: int
    end: int
    context: int
    window: int
    block_ids: torch.Tensor | None
    is_fused: bool
    mask: torch.Tensor | None

    @classmethod
    def build(
        cls,
        batch: ForwardBatch,
        index: int,
        block_size: int,
        device: torch.device,
        window: int,
        *,
        fuses: Callable[[int, int, int], bool] | None = None,
    ) -> PromptChunk:
        """index: which sequence of the batch.

        fuses: (new tokens, context, window): whether torch's operator is faster; None goes by the device.
        """
        start, end = (int(row) for row in batch.cu_seqlens_q[index : index + 2])
        seq_len = context = int(batch.seq_lens[index])
        block_ids = None
        if end - start < seq_len:
            span = ContextSpan.of(batch, np.array([index]), block_size, window)
            first, num_blocks, context = (
                int(part[0]) for part in (span.first_block, span.num_blocks, span.length)
            )
            table = batch.block_tables[index, first : first + num_blocks]
            block_ids = uploaded(table.astype(np.int64), device)
        if window >= seq_len:
            window = 0
        is_fused = fuses_chunks(device) if fuses is None else fuses(end - start, context, window)
        mask = causal_mask(end - start, context, window, device) if is_fused else None
        return cls(start, end, context, window, block_ids, is_fused, mask)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How one step's sequences attend in the layers of one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]

    @classmethod
    def build(cls, batch: ForwardBatch, block_size: int, device: torch.device, window: int) -> WindowPlan:
        """Sorts the sequences of a batch into decode groups and prompt chunks."""
        num_new = np.diff(batch.cu_seqlens_q)
        single = np.flatnonzero(num_new == 1)
        num_blocks = ContextSpan.of(batch, single, block_size, window).num_blocks
        groups = [single[np.sort(part)] for part in _by_length(num_blocks)]
        return cls(
            groups=tuple(DecodeGroup.build(batch, members, block_size, device, window) for members in groups),
            chunks=tuple(
                PromptChunk.build(batch, int(index), block_size, device, window)
                for index in np.flatnonzero(num_new > 1)
            ),
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step's sequences attend. blocks, offsets: [T] where each new token's KV is stored.

    by_window: of each window that the plan was built for.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    by_window: Mapping[int, WindowPlan]

    @classmethod
    def build(
        cls, batch: ForwardBatch, block_size: int, device: torch.device, windows: tuple[int, ...] = (0,)
    ) -> AttentionPlan:
        """windows: the distinct windows of the model's layers."""
        # A window that no sequence has outgrown is none: such layers share one plan.
        longest = int(batch.seq_lens.max())
        outgrown = {window: window if window < longest else 0 for window in windows}
        plans = {
            window: WindowPlan.build(batch, block_size, device, window)
            for window in sorted(set(outgrown.values()))
        }
        return cls(
            blocks=uploaded(batch.slot_mapping // block_size, device),
            offsets=uploaded(batch.slot_mapping % block_size, device),
            by_window={window: plans[effective] for window, effective in outgrown.items()},
        )


def plan_attention(
    batch: ForwardBatch, block_size: int, device: torch.device, windows: tuple[int, ...]
) -> AttentionPlan:
    """As AttentionPlan.build()."""
    return AttentionPlan.build(batch, block_size, device, windows)


def store(kv_T2Kh: torch.Tensor, cache_N2Kbh: torch.Tensor, plan: AttentionPlan) -> None:
    """Writes the new tokens' keys and values into their slots of one layer."""
    cache_N2Kbh[plan.blocks, :, :, plan.offsets] = narrowed(kv_T2Kh, cache_N2Kbh.dtype)


def attend(
    q_THh: torch.Tensor,
    kv_T2Kh: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    plan: AttentionPlan,
    *,
    window: int = 0,
    scale: float,
    wide_scores: bool = False,
) -> torch.Tensor:
    """Attention of every new token to what it sees of its sequence: [T, H, h].

    The new KV must be stored already.
    window: one of those that the plan was built for.  scale: what scores are multiplied with.
    wide_scores: they are fp32 whatever the type of q, as they always are inside a fused operator.
        It costs a copy of the keys, of some heads of a prompt chunk or of a decode group at a time.
    """
    of_window = plan.by_window[window]
    out_THh = torch.empty_like(q_THh, memory_format=torch.contiguous_format)
    for chunk in of_window.chunks:
        q_HTh = q_THh[chunk.start : chunk.end].transpose(0, 1)
        attended = attend_chunk(q_HTh, kv_T2Kh, cache_N2Kbh, chunk, scale=scale, wide_scores=wide_scores)
        out_THh[chunk.start : chunk.end] = attended.transpose(0, 1)
    for group in of_window.groups:
        if group.rows is None:
            return _attend_group(q_THh, cache_N2Kbh, group, scale, wide_scores)
        out_THh[group.rows] = _attend_group(q_THh[group.rows], cache_N2Kbh, group, scale, wide_scores)
    return out_THh


def attend_chunk(
    q_HTh: torch.Tensor,
    kv_T2Kh: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    chunk: PromptChunk,
    *,
    scale: float,
    wide_scores: bool,
) -> torch.Tensor:
    """Attention of one prompt chunk, [H, n, h]; q: [H, n, h], kv: of all the step's new tokens."""
    if chunk.block_ids is None:
        kv_2KCh = kv_T2Kh[chunk.start : chunk.end].permute(1, 2, 0, 3)
    else:
        kv_2KCh = narrowed(_gather(cache_N2Kbh, chunk.block_ids)[:, :, : chunk.context], q_HTh.dtype)
    if chunk.is_fused:
        return fused_attention(q_HTh, kv_2KCh, chunk.mask, scale=scale)
    q_KGTh = q_HTh.view(kv_2KCh.shape[1], -1, *q_HTh.shape[1:])
    return blocked_attention(
        q_KGTh, kv_2KCh[0], kv_2KCh[1], window=chunk.window, scale=scale, wide_scores=wide_scores
    ).flatten(0, 1)


def fuses_chunks(device: torch.device) -> bool:
    """Whether torch's fused operator is the fastest for prompt chunks there."""
    return device.type != "cpu"


def fused_attention(
    q_HTh: torch.Tensor, kv_2KCh: torch.Tensor, mask_TC: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """Attention by torch's fused operator, [H, T, h]. mask_TC: from causal_mask()."""
    return functional.scaled_dot_product_attention(
        q_HTh[None],
        kv_2KCh[:1],
        kv_2KCh[1:],
        attn_mask=mask_TC,
        is_causal=mask_TC is None,
        scale=scale,
        enable_gqa=True,
    )[0]


def causal_mask(num_new: int, context: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Which of C positions the last T see: [T, C] bool, or None if T is C and nothing but order counts."""
    if num_new == context and not window:
        return None
    before = context - num_new
    mask_TC = torch.ones(num_new, context, dtype=torch.bool, device=device).tril_(before)
    return mask_TC.triu_(before - window + 1) if window else mask_TC


def _attend_group(
    q_BHh: torch.Tensor, cache_N2Kbh: torch.Tensor, group: DecodeGroup, scale: float, wide_scores: bool
) -> torch.Tensor:
    # Fused attention is slow with one query per sequence; the G queries that share a kv head
    # make one small product per sequence and kv head instead.
    num_sequences, num_heads, head_dim = q_BHh.shape
    num_kv_heads = cache_N2Kbh.shape[2]
    kv_2KPh = narrowed(_gather(cache_N2Kbh, group.block_ids), q_BHh.dtype)
    kv_2KPh[1].index_fill_(1, group.stale, 0)
    k_BCh, v_BCh = kv_2KPh.view(2, num_kv_heads * num_sequences, -1, head_dim)
    q_BGh = q_BHh.reshape(num_sequences, num_kv_heads, -1, head_dim)
    q_BGh = q_BGh.transpose(0, 1).reshape(len(k_BCh), -1, head_dim)
    if wide_scores:
        q_BGh, k_BCh = q_BGh.float(), k_BCh.float()
    scores_BGC = scaled_product(q_BGh, k_BCh.transpose(1, 2), scale)
    by_sequence = scores_BGC.view(num_kv_heads, num_sequences, -1, scores_BGC.shape[-1])
    by_sequence.masked_fill_(group.masked[None, :, None], -torch.inf)
    # Exponentials and their sum are fp32 inside the operator.
    weights_BGC = torch.softmax(scores_BGC, dim=-1).to(v_BCh.dtype)
    out_KBGh = torch.bmm(weights_BGC, v_BCh).view(num_kv_heads, num_sequences, -1, head_dim)
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


def _stale(padding: BoolArray, span: ContextSpan, block_size: int) -> BoolArray:
    # Padding repeats the first block: it holds only the sequence's own tokens once that is full.
    own = np.arange(padding.shape[1]) < (span.num_blocks * block_size)[:, None]
    return np.asarray(padding & (own | (span.length < block_size)[:, None]))
