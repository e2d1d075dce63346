"""Attention of the newest tokens of each sequence to its paged context: the decode kernel.

    out[t] = softmax(cap(scale * q[t] k^T)) v  over the keys  max(0, i - window + 1) .. i  of t's sequence,
    i its position there;  cap(s) = soft_cap * tanh(s / soft_cap), or s where soft_cap is 0

A sequence brings 1 to 8 new tokens, whose keys and values are in the cache already. A context is split:
engine/kernels/context_splits.py says how, and has the kernel that puts the splits together.

Layout: q and out [T, H, h], heads and rows of any stride; the cache is one layer's view [N, 2, K, b, h] of
either layout; h contiguous everywhere. The H / K query heads of a kv head, times the new tokens, are the
rows of one matrix product, padded to 16, at most 32 at a time of heads of 128, 16 of wider and 64 of narrower
ones; h is padded to a power of two.
Grid: (sequences * tiles of rows, K, splits).
Dtypes: keys and values are narrowed to q's dtype, as engine/model/kv_range.py does; products have fp32 sums;
scores, softmax and what splits leave are fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.context_splits import Splits, context_of, reduce_launch, weighed
from engine.kernels.kernel import Config, Kernel, Launch, Shape, bucket, type_name
from engine.kernels.kv_range import narrowed
from engine.kernels.sequences import Sequences
from engine.model import kv_range

MAX_NEW_TOKENS = 8
_LOG2_E = 1.4426950408889634


def paged_attention_reference(
    q_THh: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    sequences: Sequences,
    out_THh: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """The same in plain torch, sequence by sequence, in fp32; reads the sequences' numbers on the host."""
    group, block_size = q_THh.shape[1] // cache_N2Kbh.shape[2], cache_N2Kbh.shape[3]
    of_each = (sequences.starts.tolist(), sequences.lengths.tolist(), sequences.seq_lens.tolist())
    for table, start, length, seq_len in zip(sequences.block_tables, *of_each, strict=True):
        blocks = cache_N2Kbh[table[: -(-seq_len // block_size)].long()]
        kv_2KCh = kv_range.narrowed(
            blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len], q_THh.dtype
        ).float()
        k_HCh, v_HCh = kv_2KCh.repeat_interleave(group, dim=1)
        scores_HtC = scale * q_THh[start : start + length].float().transpose(0, 1) @ k_HCh.transpose(1, 2)
        if soft_cap:
            scores_HtC = soft_cap * torch.tanh(scores_HtC / soft_cap)
        behind = torch.arange(seq_len - length, seq_len)[:, None] - torch.arange(seq_len)
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        weights_HtC = scores_HtC.masked_fill(hidden.to(scores_HtC.device), -torch.inf).softmax(-1)
        out_THh[start : start + length] = (weights_HtC @ v_HCh).transpose(0, 1).to(out_THh.dtype)


@triton.jit
def _scores(q, k, scale_log2, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """Scores in base 2: their exponentials are powers of 2. scale_log2 is scale / soft_cap with a cap."""
    products = tl.dot(q, k.T, input_precision="ieee") * scale_log2
    if HAS_SOFT_CAP:
        # soft_cap * log2(e) * tanh(x), from exp2, which every backend has; saturates at both ends.
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * 2.8853900817779268))
        products = tanh * (soft_cap * 1.4426950408889634)
    return products


@triton.jit
def _keys_and_values(
    kv_ptr,
    table_ptr,
    positions,
    is_read,
    columns,
    block_stride,
    values_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """[keys, columns] of both; zeros where nothing is read: foreign slots may hold NaN."""
    block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
    rows = block_ids * block_stride + (positions % BLOCK_SIZE) * slot_stride
    offsets = rows[:, None] + columns[None, :]
    mask = is_read[:, None] & (columns < HEAD_DIM)[None, :]
    keys = tl.load(kv_ptr + offsets, mask=mask, other=0.0)
    values = tl.load(kv_ptr + values_stride + offsets, mask=mask, other=0.0)
    return keys, values


# These differ from step to step, or from layer to layer.
@triton.jit(do_not_specialize=["table_stride", "row_tiles", "max_length", "window"])
def _paged_attention_kernel(
    q_ptr,
    cache_ptr,
    starts_ptr,
    lengths_ptr,
    seq_lens_ptr,
    tables_ptr,
    out_ptr,
    sums_ptr,
    q_row_stride,
    q_head_stride,
    block_stride,
    values_stride,
    kv_head_stride,
    slot_stride,
    table_stride,
    out_row_stride,
    out_head_stride,
    row_tiles,
    max_length,
    split_tokens,
    window,
    scale_log2,
    soft_cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
):
    sequence = (tl.program_id(0) // row_tiles).to(tl.int64)
    first_row = tl.program_id(0) % row_tiles * ROWS
    kv_head = tl.program_id(1).to(tl.int64)
    length, seq_len, first = context_of(sequence, lengths_ptr, seq_lens_ptr, window, HAS_WINDOW, BLOCK_SIZE)
    begin = first + tl.program_id(2) * split_tokens
    end = tl.minimum(begin + split_tokens, seq_len)
    rows = first_row + tl.arange(0, ROWS)
    if begin < end and first_row < length * GROUP:
        columns = tl.arange(0, COLUMNS)
        is_row = rows < length * GROUP
        stored = is_row[:, None] & (columns < HEAD_DIM)[None, :]
        tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
        start = tl.load(starts_ptr + sequence).to(tl.int64)
        q_offsets = (start + tokens) * q_row_stride + heads * q_head_stride
        q = tl.load(q_ptr + q_offsets[:, None] + columns[None, :], mask=stored, other=0.0)
        last_seen = seq_len - length + tokens
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        kv_ptr = cache_ptr + kv_head * kv_head_stride
        table_ptr = tables_ptr + sequence * table_stride
        for key in range(begin, end, KEYS):
            positions = key + tl.arange(0, KEYS)
            k, v = _keys_and_values(
                kv_ptr,
                table_ptr,
                positions,
                positions < end,
                columns,
                block_stride,
                values_stride,
                slot_stride,
                HEAD_DIM,
                BLOCK_SIZE,
            )
            scores = _scores(q, narrowed(k, q.dtype), scale_log2, soft_cap, HAS_SOFT_CAP)
            behind = last_seen[:, None] - positions[None, :]
            seen = (behind >= 0) & (positions < end)[None, :]
            if HAS_WINDOW:
                seen &= behind < window
            scores = tl.where(seen, scores, float("-inf"))
            best, total, weights, fading = weighed(scores, best, total)
            sums = sums * fading[:, None]
            sums = tl.dot(weights.to(q.dtype), narrowed(v, q.dtype), sums, input_precision="ieee")
        if IS_SPLIT:
            # Splits have a buffer of their own, sequence by sequence: [rows, heads, splits], contiguous.
            pieces = (sequence * max_length + tokens) * (GROUP * tl.num_programs(1)) + heads
            pieces = pieces * tl.num_programs(2) + tl.program_id(2)
            out_offsets = pieces * HEAD_DIM
            tl.store(sums_ptr + pieces, best + tl.log2(total), mask=is_row)
        else:
            out_offsets = (start + tokens) * out_row_stride + heads * out_head_stride
        out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_offsets[:, None] + columns[None, :], out, mask=stored)


# A tile's keys wait for their block ids: 5 stages keep two tiles on their way on NVIDIA, three on AMD. With 2
# stages a tile is fetched when the one before it is done with, and other programs fill the gap.
_BUFFERS = {5: 3, 2: 1}
# Of AMD's gfx942, the smallest of all.
_MAX_SHARED_BYTES = 64 << 10
# Keys and stages where keys and values are of another type than queries: all others spill somewhere.
_MIXED = (32, 2)
# Buckets of keys in a split, the last one for more as well.
_SPLIT_TOKENS = (256, 1024, 4096)
# Sums that a warp holds: 64 registers of each thread. Twice as many spill on NVIDIA.
_MAX_WARP_SUMS = 2048


def _fits(shape: Mapping[str, int | str], config: Config) -> bool:
    head_dim, rows, element_bytes = (int(shape[name]) for name in ("head_dim", "rows", "element_bytes"))
    keys, columns = config.constants["KEYS"], triton.next_power_of_2(head_dim)
    if shape["dtype"] != shape["kv_dtype"] and (keys, config.num_stages) != _MIXED:
        return False
    held = 2 * columns * _BUFFERS[config.num_stages] + rows
    is_roomy = keys * held * element_bytes <= _MAX_SHARED_BYTES
    return bool(is_roomy and rows * columns <= config.num_warps * _MAX_WARP_SUMS)


KERNEL = Kernel(
    name="paged_attention",
    function=_paged_attention_kernel,
    configs=tuple(
        Config(constants={"KEYS": keys}, num_warps=warps, num_stages=stages)
        for keys, warps, stages in ((64, 4, 5), (32, 4, 5), (32, 4, 2), (64, 4, 2), (16, 2, 5), (16, 4, 2))
    ),
    accepts=_fits,
)


def paged_attention(
    q_THh: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    sequences: Sequences,
    out_THh: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    choices: Choices = UNMEASURED,
) -> None:
    """Writes the rows of out that belong to the sequences, and no other.

    scale: what scores are multiplied with.  window: how many keys a query sees, its own among them; 0: all.
    soft_cap: 0: none.  Raises ValueError as paged_attention_launches().
    """
    choices.run(
        *paged_attention_launches(
            q_THh, cache_N2Kbh, sequences, out_THh, scale=scale, window=window, soft_cap=soft_cap
        )
    )


def paged_attention_launches(
    q_THh: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    sequences: Sequences,
    out_THh: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Launch, ...]:
    """The calls as data, one or two. Raises ValueError for what the kernel cannot read."""
    _check(q_THh, cache_N2Kbh, sequences, out_THh)
    splits = Splits.of(q_THh, cache_N2Kbh, sequences, window)
    common = {
        "starts_ptr": sequences.starts,
        "lengths_ptr": sequences.lengths,
        "seq_lens_ptr": sequences.seq_lens,
        "max_length": sequences.max_length,
        "split_tokens": splits.num_tokens,
        "window": window,
    }
    constants = {
        "HEAD_DIM": q_THh.shape[2],
        "BLOCK_SIZE": cache_N2Kbh.shape[3],
        "COLUMNS": triton.next_power_of_2(q_THh.shape[2]),
        "HAS_WINDOW": window > 0,
    }
    attention = Launch(
        kernel=KERNEL,
        grid=lambda _: splits.grid,
        arguments={
            **common,
            **_strides(q_THh, cache_N2Kbh, out_THh),
            "q_ptr": q_THh,
            "cache_ptr": cache_N2Kbh,
            "tables_ptr": sequences.block_tables,
            "table_stride": sequences.block_tables.stride(0),
            "out_ptr": out_THh if splits.partial is None else splits.partial,
            "sums_ptr": splits.sums,
            "row_tiles": splits.row_tiles,
            "scale_log2": scale / soft_cap if soft_cap else scale * _LOG2_E,
            "soft_cap": soft_cap,
        },
        constants={
            **constants,
            "GROUP": q_THh.shape[1] // cache_N2Kbh.shape[2],
            "ROWS": splits.rows,
            "HAS_SOFT_CAP": soft_cap > 0,
            "IS_SPLIT": splits.sums is not None,
        },
        shape=_shape(q_THh, cache_N2Kbh, splits, has_window=window > 0, has_soft_cap=soft_cap > 0),
    )
    if splits.partial is None or splits.sums is None:
        return (attention,)
    return attention, reduce_launch(splits.partial, splits.sums, out_THh, common, constants)


def _strides(q_THh: torch.Tensor, cache_N2Kbh: torch.Tensor, out_THh: torch.Tensor) -> dict[str, int]:
    q_row, q_head, _ = q_THh.stride()
    block, values, kv_head, slot, _ = cache_N2Kbh.stride()
    return {
        "q_row_stride": q_row,
        "q_head_stride": q_head,
        "block_stride": block,
        "values_stride": values,
        "kv_head_stride": kv_head,
        "slot_stride": slot,
        "out_row_stride": out_THh.stride(0),
        "out_head_stride": out_THh.stride(1),
    }


def _shape(
    q_THh: torch.Tensor, cache_N2Kbh: torch.Tensor, splits: Splits, *, has_window: bool, has_soft_cap: bool
) -> Shape:
    return (
        ("head_dim", q_THh.shape[2]),
        ("group", q_THh.shape[1] // cache_N2Kbh.shape[2]),
        ("block_size", cache_N2Kbh.shape[3]),
        ("dtype", type_name(q_THh)),
        ("kv_dtype", type_name(cache_N2Kbh)),
        ("element_bytes", max(q_THh.element_size(), cache_N2Kbh.element_size())),
        ("window", int(has_window)),
        ("soft_cap", int(has_soft_cap)),
        ("rows", splits.rows),
        ("split", int(splits.sums is not None)),
        # Neighbours need no measurement of their own.
        ("split_tokens", bucket(splits.num_tokens, _SPLIT_TOKENS)),
    )


def _check(
    q_THh: torch.Tensor, cache_N2Kbh: torch.Tensor, sequences: Sequences, out_THh: torch.Tensor
) -> None:
    if not 1 <= sequences.max_length <= MAX_NEW_TOKENS:
        raise ValueError(
            f"one has {sequences.max_length} new tokens, not 1 to {MAX_NEW_TOKENS}: use prefill_attention"
        )
    if out_THh.shape != q_THh.shape or q_THh.shape[2] != cache_N2Kbh.shape[4]:
        raise ValueError("q and out must have one shape, and the cache their head_dim")
    if q_THh.shape[1] % cache_N2Kbh.shape[2]:
        raise ValueError(f"{q_THh.shape[1]} query heads do not share {cache_N2Kbh.shape[2]} kv heads evenly")
    if any(tensor.stride(-1) != 1 for tensor in (q_THh, cache_N2Kbh, out_THh, sequences.block_tables)):
        raise ValueError("heads of q, out and the cache, and rows of block tables, must be contiguous")
