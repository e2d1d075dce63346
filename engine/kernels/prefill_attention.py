"""Attention of new tokens to everything that they see of their sequence, read from the paged cache.

    out[i] = softmax(cap(scale * q[i] k[j]^T)) v[j]  over  max(0, i - window + 1) <= j <= i
    cap(x) = soft_cap * tanh(x / soft_cap), or x

Sequences of any lengths lie behind one another, without padding; what was cached before and the new tokens
themselves are both in the cache. A window counts the keys that a query sees, its own among them; window 0
sees all. Slots without a token may hold anything.

Layout: q and out [T, H, h], cache [N, 2, K, b, h] of one layer; rows h contiguous, all other strides free, so
HND and NHD are the same to it. q and out have one type, in which products are taken; keys and values of
another type are converted as engine/model/kv_range.py says. Scores, their softmax and all sums are fp32.
Grid: a tile of new tokens of one sequence, for all query heads of a kv head at once, up to 16: a row of the
product is a token with a head. So a key is read once for all of them, and a short prompt fills a tile.
Softmax goes along the keys with a running maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao,
arXiv:2307.08691). Its exponentials are powers of two; log2(e) is part of the scale. Without a window only
the keys at the diagonal are masked; with one all are: it is short, and one loop needs fewer registers.

Shape suffixes: T tokens, H heads, K kv heads, N blocks, b block size, h head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.kernel import Config, Kernel, Launch, type_name
from engine.kernels.kv_range import narrowed
from engine.kernels.paged_attention import paged_attention_reference
from engine.kernels.sequences import Sequences

# Query heads of one kv head that share a program; more of them are spread over several.
_MAX_HEADS = 16
# Within a tile of at most 128 rows, 32 bits count elements.
_MAX_ROW_STRIDE = 1 << 23
_LOG2_E = math.log2(math.e)


# In plain torch the number of new tokens makes no difference.
prefill_attention_reference = paged_attention_reference


@triton.jit
def _load_tile(
    pointers, keys_inside, dims_inside, dtype: tl.constexpr, MASKED: tl.constexpr, PADDED: tl.constexpr
):
    if MASKED and PADDED:
        tile = tl.load(pointers, mask=keys_inside[:, None] & dims_inside[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=keys_inside[:, None], other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=dims_inside[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return narrowed(tile, dtype)


@triton.jit
def _attend_span(
    state,
    q,
    positions,
    first,
    end,
    kv,
    numbers,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Goes on along keys first .. end; MASKED where not every row sees every one of them.

    state: weighted sums of values, sums of weights, and maxima of scores so far.
    """
    sums, total, top = state
    table_ptr, key_ptr, value_offset, block_stride, slot_stride, seq_len = kv
    scale, soft_cap, window = numbers
    WIDTH: tl.constexpr = q.shape[1]
    PADDED: tl.constexpr = WIDTH != HEAD_DIM
    dims = tl.arange(0, WIDTH)
    for start in tl.range(first, end, BLOCK_N, num_stages=1 if MASKED and not HAS_WINDOW else None):
        within = tl.arange(0, BLOCK_N)
        keys = start + within
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
            # One base for all of the tile: the rest is the same in every turn.
            base_ptr = key_ptr + block * block_stride + start % BLOCK_SIZE * slot_stride
            pointers = base_ptr + ((within * slot_stride)[:, None] + dims[None, :])
        else:
            # Columns of the table behind the sequence's blocks mean nothing.
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < seq_len, other=0).to(tl.int64)
            rows_ptr = key_ptr + (blocks * block_stride + keys % BLOCK_SIZE * slot_stride)
            pointers = rows_ptr[:, None] + dims[None, :]
        k = _load_tile(pointers, keys < seq_len, dims < HEAD_DIM, q.dtype, MASKED, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFT_CAP:
            # tanh, right at both ends; the launch says what is in the scale.
            scores = 1 - 2 / (tl.exp2(scores * scale) + 1)
            factor = soft_cap
        else:
            factor = scale
        if MASKED:
            last = positions - start
            seen = within[None, :] <= last[:, None]
            if HAS_WINDOW:
                seen &= within[None, :] > (last - window)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        base = higher
        if HAS_WINDOW:
            # Some rows see no key of this tile, and saw none before.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        # The factor is positive and may follow the maximum: one multiply-add per score.
        weights = tl.exp2(scores * factor - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        v = _load_tile(pointers + value_offset, keys < seq_len, dims < HEAD_DIM, q.dtype, MASKED, PADDED)
        sums = tl.dot(weights.to(q.dtype), v, sums * kept[:, None], input_precision="ieee")
        top = higher
    return sums, total, top


# The table's stride differs from step to step, the window from layer to layer.
@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill_attention_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    tiles_ptr,
    starts_ptr,
    lengths_ptr,
    seq_lens_ptr,
    tables_ptr,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    block_stride,
    value_stride,
    head_stride,
    slot_stride,
    table_stride,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile, program = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    length = tl.load(lengths_ptr + sequence)
    seq_len = tl.load(seq_lens_ptr + sequence)
    cached = seq_len - length
    kv_head = (program // PARTS).to(tl.int64)

    # Of the tile: the first row's place is wide, the others' distance from it is not.
    rows = tl.arange(0, BLOCK_M)
    tokens, heads = rows // HEADS, rows % HEADS
    first_head = (program % PARTS) * HEADS
    dims = tl.arange(0, WIDTH)
    inside = (tokens < tl.minimum(length - first, TOKENS)) & (first_head + heads < GROUP)
    inside = inside[:, None] & (dims < HEAD_DIM)[None, :]
    token_row, head_row = start + first, kv_head * GROUP + first_head
    q_ptr += token_row * q_row_stride + head_row * q_head_stride
    q_offsets = tokens * q_row_stride + heads * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=inside, other=0.0)
    positions = cached + first + tokens
    table_ptr, key_ptr = tables_ptr + sequence * table_stride, cache_ptr + kv_head * head_stride
    kv = (table_ptr, key_ptr, value_stride, block_stride, slot_stride, seq_len)
    numbers = (scale, soft_cap, window)
    end = tl.minimum(cached + first + TOKENS, seq_len)
    state = (
        tl.zeros([BLOCK_M, WIDTH], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
    )
    # fmt: off
    if HAS_WINDOW:
        begin = tl.maximum(cached + first + 1 - window, 0) // BLOCK_N * BLOCK_N
        state = _attend_span(state, q, positions, begin, end, kv, numbers,
                             HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, True, BLOCK_N)
    else:
        # Every row sees every key before the diagonal.
        diagonal = (cached + first + 1) // BLOCK_N * BLOCK_N
        state = _attend_span(state, q, positions, 0, diagonal, kv, numbers,
                             HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, False, BLOCK_N)
        state = _attend_span(state, q, positions, diagonal, end, kv, numbers,
                             HEAD_DIM, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, True, BLOCK_N)
    # fmt: on
    sums, total, _ = state
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    # Where the rows lie is computed again: this read, which always gives `first`, keeps the compiler from
    # holding all of it in registers through the loops, which made them spill.
    again = tl.load(tiles_ptr + 2 * tile + 1, volatile=True)
    rows += again - first
    tokens, heads = rows // HEADS, rows % HEADS
    inside = (tokens < tl.minimum(length - again, TOKENS)) & (first_head + heads < GROUP)
    inside = inside[:, None] & (dims < HEAD_DIM)[None, :]
    out_ptr += token_row * out_row_stride + head_row * out_head_stride
    out_offsets = tokens * out_row_stride + heads * out_head_stride
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], out, mask=inside)


def _configs(*sizes: tuple[int, int, int, int]) -> tuple[Config, ...]:
    """Of rows, keys, warps and stages."""
    return tuple(
        Config(constants={"BLOCK_M": rows, "BLOCK_N": keys}, num_warps=warps, num_stages=stages)
        for rows, keys, warps, stages in sizes
    )


# None of them spills on any of the audit's devices.
_CONFIGS = _configs((128, 64, 8, 2), (64, 32, 4, 3), (64, 64, 8, 2), (32, 32, 2, 2))
# For heads of more than 128.
_WIDE_CONFIGS = _configs((64, 32, 8, 2), (32, 32, 8, 2))
# Where keys and values are of another type than queries: converting them takes registers too.
_MIXED_CONFIGS = _configs((64, 32, 4, 3), (32, 32, 2, 2))
_WIDE_MIXED_CONFIGS = _configs((64, 16, 8, 2), (32, 16, 8, 2))


def _accepts(shape: Mapping[str, int | str], config: Config) -> bool:
    head_dim, group, new_tokens = (int(shape[name]) for name in ("head_dim", "group", "new_tokens"))
    rows = config.constants["BLOCK_M"]
    smallest = 32
    if shape["dtype"] == shape["kv_dtype"]:
        declared = _WIDE_CONFIGS if head_dim > 128 else _CONFIGS
    else:
        declared = _WIDE_MIXED_CONFIGS if head_dim > 128 else _MIXED_CONFIGS
    if config not in declared:
        return False
    if shape["dtype"] == "float32":
        return rows == smallest
    # Tiles that no sequence fills, and small ones for long sequences, are not worth a measurement.
    needed = max(smallest, new_tokens * min(group, _MAX_HEADS))
    return rows <= needed and (rows > smallest or needed <= 64)


KERNEL = Kernel(
    name="prefill_attention",
    function=_prefill_attention_kernel,
    configs=(*_CONFIGS, *_WIDE_CONFIGS, *_WIDE_MIXED_CONFIGS),
    accepts=_accepts,
)


def prefill_attention(
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
    """Writes the rows of out that are new tokens of the sequences, and no others.

    Their keys and values must be stored already.
    window: how many keys a query sees, its own among them; 0: all up to its own.
    scale: what scores are multiplied with.  soft_cap: 0 for none.
    """
    choices.run(
        prefill_attention_launch(
            q_THh, cache_N2Kbh, sequences, out_THh, scale=scale, window=window, soft_cap=soft_cap
        )
    )


def prefill_attention_launch(
    q_THh: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    sequences: Sequences,
    out_THh: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Launch:
    """The call as data. Raises ValueError for tensors and numbers that the kernel cannot take."""
    _check(q_THh, cache_N2Kbh, out_THh, scale, window, soft_cap)
    _, num_heads, head_dim = q_THh.shape
    num_kv_heads, block_size = cache_N2Kbh.shape[2:4]
    group = num_heads // num_kv_heads
    # A window that no sequence has outgrown is none.
    has_window = 0 < window < sequences.max_seq_len
    parts = -(-group // _MAX_HEADS)
    heads = -(-group // parts)

    def tiles(constants: Mapping[str, int]) -> torch.Tensor:
        return sequences.tiles(constants["BLOCK_M"] // heads)

    return Launch(
        kernel=KERNEL,
        grid=lambda constants: (len(tiles(constants)), num_kv_heads * parts),
        arguments={
            **_tensors(q_THh, cache_N2Kbh, sequences, out_THh),
            # A cap's scale is that of tanh(x) = 1 - 2 / (2^x' + 1): x' = 2 log2(e) x.
            "scale": _LOG2_E * scale * (2 / soft_cap if soft_cap else 1),
            "soft_cap": _LOG2_E * soft_cap,
            "window": window,
        },
        arguments_for=lambda constants: {"tiles_ptr": tiles(constants)},
        constants={
            "GROUP": group,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "WIDTH": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_SIZE": block_size,
            "HAS_WINDOW": has_window,
            "HAS_SOFT_CAP": soft_cap > 0,
        },
        shape=(
            ("head_dim", head_dim),
            ("group", group),
            ("block_size", block_size),
            ("dtype", type_name(q_THh)),
            ("kv_dtype", type_name(cache_N2Kbh)),
            ("window", int(has_window)),
            ("soft_cap", int(soft_cap > 0)),
            ("new_tokens", _bucket(sequences.max_length)),
        ),
    )


def _tensors(
    q_THh: torch.Tensor, cache_N2Kbh: torch.Tensor, sequences: Sequences, out_THh: torch.Tensor
) -> Mapping[str, torch.Tensor | int]:
    """With their strides."""
    return {
        "q_ptr": q_THh,
        "cache_ptr": cache_N2Kbh,
        "out_ptr": out_THh,
        "starts_ptr": sequences.starts,
        "lengths_ptr": sequences.lengths,
        "seq_lens_ptr": sequences.seq_lens,
        "tables_ptr": sequences.block_tables,
        "q_row_stride": q_THh.stride(0),
        "q_head_stride": q_THh.stride(1),
        "out_row_stride": out_THh.stride(0),
        "out_head_stride": out_THh.stride(1),
        "block_stride": cache_N2Kbh.stride(0),
        "value_stride": cache_N2Kbh.stride(1),
        "head_stride": cache_N2Kbh.stride(2),
        "slot_stride": cache_N2Kbh.stride(3),
        "table_stride": sequences.block_tables.stride(0),
    }


def _bucket(length: int) -> int:
    """Lengths that share a choice: the next power of four, between 16 and 4,096."""
    return int(4 ** min(max(math.ceil(math.log(length, 4)), 2), 6))


def _check(
    q_THh: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    out_THh: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    if out_THh.shape != q_THh.shape or out_THh.dtype != q_THh.dtype:
        raise ValueError(
            f"out must be as q, {list(q_THh.shape)} {q_THh.dtype}; "
            f"it is {list(out_THh.shape)} {out_THh.dtype}"
        )
    if q_THh.shape[2] != cache_N2Kbh.shape[4] or q_THh.shape[1] % cache_N2Kbh.shape[2]:
        raise ValueError(
            f"q has {q_THh.shape[1]} heads of {q_THh.shape[2]}, which the cache's {cache_N2Kbh.shape[2]} of "
            f"{cache_N2Kbh.shape[4]} cannot serve"
        )
    if max(q_THh.stride(0), out_THh.stride(0)) >= _MAX_ROW_STRIDE:
        raise ValueError(f"rows of q and out must lie less than {_MAX_ROW_STRIDE} elements apart")
    if any(tensor.stride(-1) != 1 for tensor in (q_THh, cache_N2Kbh, out_THh)):
        raise ValueError("the heads' rows of q, cache and out must be contiguous")
    if scale <= 0 or window < 0 or soft_cap < 0:
        raise ValueError(
            f"scale {scale} must be positive, window {window} and soft_cap {soft_cap} not negative"
        )
