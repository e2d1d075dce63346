"""Contexts cut into splits, so that few sequences fill a device, and the kernel that puts splits together.

    out = sum_s 2^(L_s - M) out_s / sum_s 2^(L_s - M),   M = max_s L_s

out_s is attention to the keys of one split alone, L_s the base-2 logarithm of the sum of its exponentials,
-inf for a split of which a query sees nothing. This is no approximation (FlashAttention, arXiv:2205.14135,
section 3.1).

Layout: partial [R, H, S, h] and sums [R, H, S], fp32, contiguous; out [T, H, h] with any strides of rows and
heads. Grid: (R, H). R = sequences * new tokens of the longest, S splits of the longest context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.kernel import Config, Kernel, Launch, bucket, type_name
from engine.kernels.sequences import Sequences

_MIN_ROWS, _MAX_ROWS = 16, 64
# Sums of a tile of rows, which are in registers all the while: 32 rows of heads of 128. Twice as many spill.
_MAX_SUMS = 32 * 128
# Splits are multiples of every tile of keys; shorter ones would cost more to reduce than they save.
_SPLIT_GRAIN = 128
# Buckets of splits, the last one for more as well.
_SPLITS = (8, 16, 32)
# Programs wanted for each of the device's processors: as many as find room there together.
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def context_of(
    sequence, lengths_ptr, seq_lens_ptr, window, HAS_WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """New tokens of a sequence, its context, and where splits begin: at the block of the first key seen."""
    length = tl.load(lengths_ptr + sequence)
    seq_len = tl.load(seq_lens_ptr + sequence)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - length - window + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    return length, seq_len, first


@triton.jit
def weighed(scores, best, total):
    """One step of a running softmax over [rows, scores]: weights, and what earlier ones fade by."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet: 0 in place of an infinity, of which differences are NaN.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    fading = tl.exp2(best - base)
    return new_best, total * fading + tl.sum(weights, 1), weights, fading


@triton.jit(do_not_specialize=["max_length", "max_splits", "window"])
def _reduce_kernel(
    partial_ptr,
    sums_ptr,
    starts_ptr,
    lengths_ptr,
    seq_lens_ptr,
    out_ptr,
    out_row_stride,
    out_head_stride,
    max_length,
    max_splits,
    split_tokens,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
):
    sequence = (tl.program_id(0) // max_length).to(tl.int64)
    token, head = tl.program_id(0) % max_length, tl.program_id(1)
    length, seq_len, first = context_of(sequence, lengths_ptr, seq_lens_ptr, window, HAS_WINDOW, BLOCK_SIZE)
    if token < length:
        num_splits = tl.cdiv(seq_len - first, split_tokens)
        row = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * max_splits
        columns = tl.arange(0, COLUMNS)
        best = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        sums = tl.zeros((1, COLUMNS), tl.float32)
        for split in range(0, num_splits, SPLITS):
            splits = split + tl.arange(0, SPLITS)
            logs = tl.load(sums_ptr + row + splits, mask=splits < num_splits, other=float("-inf"))
            # A split of keys that this token does not see has no softmax: 0 / 0.
            filled = (logs != float("-inf"))[:, None] & (columns < HEAD_DIM)[None, :]
            offsets = (row + splits)[:, None] * HEAD_DIM + columns[None, :]
            partial = tl.load(partial_ptr + offsets, mask=filled, other=0.0)
            best, total, weights, fading = weighed(logs[None, :], best, total)
            sums = sums * fading[:, None] + tl.sum(partial * tl.trans(weights), 0)[None, :]
        start = tl.load(starts_ptr + sequence).to(tl.int64)
        out_offset = (start + token) * out_row_stride + head.to(tl.int64) * out_head_stride
        out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        mask = (columns < HEAD_DIM)[None, :]
        tl.store(out_ptr + out_offset + columns[None, :], out, mask=mask)


REDUCE_KERNEL = Kernel(
    name="paged_attention_reduce",
    function=_reduce_kernel,
    configs=tuple(
        Config(constants={"SPLITS": splits}, num_warps=warps) for splits, warps in ((16, 4), (8, 2), (32, 4))
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How contexts are cut, and what the pieces leave.

    rows: of one tile of the product.  row_tiles: of one sequence and kv head.  num_tokens: keys of one split.
    partial, sums: None where there is one split. R sequences * new tokens of the longest, S splits.
    """

    rows: int
    row_tiles: int
    num_tokens: int
    grid: tuple[int, int, int]
    partial: torch.Tensor | None = None
    sums: torch.Tensor | None = None

    @classmethod
    def of(cls, q_THh: torch.Tensor, cache_N2Kbh: torch.Tensor, sequences: Sequences, window: int) -> Splits:
        """Splits for a call of paged_attention(), with room for what they leave."""
        num_heads, head_dim = q_THh.shape[1:]
        num_kv_heads, block_size = cache_N2Kbh.shape[2:4]
        num_rows = num_heads // num_kv_heads * sequences.max_length
        max_rows = min(_MAX_ROWS, max(_MIN_ROWS, _MAX_SUMS // triton.next_power_of_2(head_dim)))
        rows = min(max(triton.next_power_of_2(num_rows), _MIN_ROWS), max_rows)
        tiles = -(-num_rows // rows)
        span = sequences.max_seq_len
        if window:
            # What the longest's queries see, and what may lie before it in its first block.
            span = min(span, window + sequences.max_length - 1 + block_size - 1)
        num_programs = sequences.num_sequences * tiles * num_kv_heads
        num_tokens = _split_tokens(span, num_programs, sequences.num_processors)
        grid = (sequences.num_sequences * tiles, num_kv_heads, -(-span // num_tokens))
        sums = partial = None
        if grid[2] > 1:
            shape = (sequences.num_sequences * sequences.max_length, num_heads, grid[2])
            sums = torch.empty(shape, dtype=torch.float32, device=q_THh.device)
            partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_THh.device)
        return cls(
            rows=rows,
            row_tiles=tiles,
            num_tokens=num_tokens,
            grid=grid,
            partial=partial,
            sums=sums,
        )


def _split_tokens(span: int, num_programs: int, num_processors: int) -> int:
    """Keys of one split: as many splits as fill the device, none shorter than the grain."""
    num_splits = max(1, num_processors * _PROGRAMS_PER_PROCESSOR // num_programs)
    return -(-span // (num_splits * _SPLIT_GRAIN)) * _SPLIT_GRAIN


def reduce_launch(
    partial: torch.Tensor,
    sums: torch.Tensor,
    out_THh: torch.Tensor,
    common: Mapping[str, Any],
    constants: Mapping[str, Any],
) -> Launch:
    """The call as data. common, constants: what both kernels take, as paged_attention_launches() has them."""
    num_rows, num_heads, num_splits = sums.shape
    return Launch(
        kernel=REDUCE_KERNEL,
        grid=lambda _: (num_rows, num_heads),
        arguments={
            **common,
            "partial_ptr": partial,
            "sums_ptr": sums,
            "out_ptr": out_THh,
            "out_row_stride": out_THh.stride(0),
            "out_head_stride": out_THh.stride(1),
            "max_splits": num_splits,
        },
        constants=constants,
        shape=(
            ("head_dim", out_THh.shape[2]),
            ("block_size", constants["BLOCK_SIZE"]),
            ("dtype", type_name(out_THh)),
            ("window", int(constants["HAS_WINDOW"])),
            ("splits", bucket(num_splits, _SPLITS)),
        ),
    )
