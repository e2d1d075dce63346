"""Rotary embedding of queries and keys, and the storing of keys and values, in one pass over q, k and v.

    x = x / sqrt(mean(x^2) + eps) * head_norm            of queries and keys, if there is a head_norm
    [a, b] = [a cos - b sin, b cos + a sin]              of queries and keys, a and b the halves of a head
    q[t] = q;  cache[slots[t]] = k, v
    rows[t] = k, v                                       if there are rows: the new tokens' alone
    stage[stage_slots[t]] = k, v                         if there is a stage, of tokens that have a slot there

Norm and rotation are fp32. What they give is rounded to the type of qkv first and then to the type that it is
stored in, by the rules of engine/kernels/kv_range.py: so the cache, the rows and the stage hold what an
engine without this kernel stores. Queries are changed in place; keys and values in qkv stay as they are. The
stage is memory of engine/kv_staging.py: with it, KV that is to be sent need not be read from the cache again.

Layout: qkv is [T, H + 2K, h], heads of q, k and v in this order, each head contiguous, any strides else. The
cache and the stage are one layer's view [N, 2, K, b, h] of either layout; slot s is in block s // b, at
s % b. Of cos and sin one half is read: engine.model.rope.Rope.rows gives the same numbers twice.
Grid: tokens x tiles of HEADS heads, those of the queries first; a tile of kv heads has their keys and values.

Shape suffixes: T tokens, N heads of q, k and v together in qkv, of q and k in head_norm, blocks in a cache
or a stage; K kv heads, b block_size, h head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.kernel import Config, Kernel, Launch, Shape, type_name
from engine.kernels.kv_range import marked, narrowed
from engine.model.kv_range import infinities_to_nan_
from engine.model.kv_range import narrowed as narrowed_reference
from engine.model.layers import norm_heads, rotated

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rope_store_kv_reference(
    qkv_TNh: torch.Tensor,
    cos_T1h: torch.Tensor,
    sin_T1h: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    head_norm_Nh: torch.Tensor | None = None,
    eps: float = 0.0,
    rows_T2Kh: torch.Tensor | None = None,
    stage_N2Kbh: torch.Tensor | None = None,
    stage_slots_T: torch.Tensor | None = None,
) -> None:
    """The same in plain torch."""
    num_kv_heads = cache_N2Kbh.shape[2]
    heads = qkv_TNh[:, : num_heads + num_kv_heads]
    if head_norm_Nh is not None:
        heads = norm_heads(heads, head_norm_Nh, eps)
    heads = rotated(heads, cos_T1h, sin_T1h).to(qkv_TNh.dtype)
    qkv_TNh[:, :num_heads] = heads[:, :num_heads]
    kv_T2Kh = torch.stack((heads[:, num_heads:], qkv_TNh[:, num_heads + num_kv_heads :]), dim=1)
    if kv_T2Kh.dtype == torch.float16:
        infinities_to_nan_(kv_T2Kh)
    _store_reference(kv_T2Kh, cache_N2Kbh, slots_T)
    if rows_T2Kh is not None:
        rows_T2Kh.copy_(narrowed_reference(kv_T2Kh, rows_T2Kh.dtype))
    if stage_N2Kbh is not None and stage_slots_T is not None:
        is_staged_T = stage_slots_T >= 0
        _store_reference(kv_T2Kh[is_staged_T], stage_N2Kbh, stage_slots_T[is_staged_T])


def _store_reference(kv_T2Kh: torch.Tensor, blocks_N2Kbh: torch.Tensor, slots_T: torch.Tensor) -> None:
    block_size = blocks_N2Kbh.shape[3]
    stored = narrowed_reference(kv_T2Kh, blocks_N2Kbh.dtype)
    blocks_N2Kbh[slots_T // block_size, :, :, slots_T % block_size] = stored


@triton.jit
def _turned(a, b, cos, sin, norm_ptr, mask, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    # [HEADS, half] both halves of some heads, normed and rotated, fp32. norm_ptr: to the first halves' norms.
    a, b = a.to(tl.float32), b.to(tl.float32)
    if HAS_NORM:
        factor = tl.math.rsqrt(tl.sum(a * a + b * b, axis=1) / HEAD_DIM + eps)[:, None]
        a *= factor * tl.load(norm_ptr, mask=mask, other=0.0)
        b *= factor * tl.load(norm_ptr + HEAD_DIM // 2, mask=mask, other=0.0)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _store_halves(ptr, a, b, mask, HALF: tl.constexpr):
    tl.store(ptr, narrowed(marked(a), ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + HALF, narrowed(marked(b), ptr.dtype.element_ty), mask=mask)


@triton.jit
def _slot(ptr, slot, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    # Where a slot begins, of int64.
    return ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride


@triton.jit
def _rope_store_kv_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    cache_ptr,
    slots_ptr,
    rows_ptr,
    stage_ptr,
    stage_slots_ptr,
    eps,
    qkv_token_stride,
    qkv_head_stride,
    cos_stride,
    sin_stride,
    cache_block_stride,
    cache_kv_stride,
    cache_head_stride,
    cache_slot_stride,
    stage_block_stride,
    stage_kv_stride,
    stage_head_stride,
    stage_slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_STAGE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    SIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query = tile < QUERY_TILES
    # No tile has heads of queries and of keys.
    first = tl.where(is_query, tile * HEADS, NUM_HEADS + (tile - QUERY_TILES) * HEADS)
    heads = first + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (heads < tl.where(is_query, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS)) & (columns < HALF)

    cos = tl.load(cos_ptr + token * cos_stride + columns, mask=columns < HALF, other=0.0)
    # The second half of the table has the plain sign.
    sin = tl.load(sin_ptr + token * sin_stride + HALF + columns, mask=columns < HALF, other=0.0)
    ptr = qkv_ptr + token * qkv_token_stride + heads.to(tl.int64) * qkv_head_stride + columns
    a, b = tl.load(ptr, mask=mask, other=0.0), tl.load(ptr + HALF, mask=mask, other=0.0)
    norms = norm_ptr + heads * HEAD_DIM + columns if HAS_NORM else norm_ptr
    a, b = _turned(a, b, cos, sin, norms, mask, eps, HEAD_DIM, HAS_NORM)
    a, b = a.to(qkv_ptr.dtype.element_ty), b.to(qkv_ptr.dtype.element_ty)
    if is_query:
        tl.store(ptr, a, mask=mask)
        tl.store(ptr + HALF, b, mask=mask)
    else:
        v_ptr = ptr + NUM_KV_HEADS * qkv_head_stride
        v_a, v_b = tl.load(v_ptr, mask=mask, other=0.0), tl.load(v_ptr + HALF, mask=mask, other=0.0)
        kv_heads = (heads - NUM_HEADS).to(tl.int64)
        slot = tl.load(slots_ptr + token)
        k_ptr = _slot(cache_ptr, slot, cache_block_stride, cache_slot_stride, BLOCK_SIZE)
        k_ptr += kv_heads * cache_head_stride + columns
        _store_halves(k_ptr, a, b, mask, HALF)
        _store_halves(k_ptr + cache_kv_stride, v_a, v_b, mask, HALF)
        if HAS_ROWS:
            row_ptr = rows_ptr + token * (2 * SIDE) + kv_heads * HEAD_DIM + columns
            _store_halves(row_ptr, a, b, mask, HALF)
            _store_halves(row_ptr + SIDE, v_a, v_b, mask, HALF)
        if HAS_STAGE:
            slot = tl.load(stage_slots_ptr + token)
            if slot >= 0:
                staged_ptr = _slot(stage_ptr, slot, stage_block_stride, stage_slot_stride, BLOCK_SIZE)
                staged_ptr += kv_heads * stage_head_stride + columns
                _store_halves(staged_ptr, a, b, mask, HALF)
                _store_halves(staged_ptr + stage_kv_stride, v_a, v_b, mask, HALF)


def _accepts(shape: Mapping[str, int | str], config: Config) -> bool:
    heads = config.constants["HEADS"]
    # A tile has half as many columns as a head. Each thread has an element or more, and queries fill more
    # than half of a tile.
    elements = heads * triton.next_power_of_2(int(shape["head_dim"]) // 2)
    is_wide_enough = config.num_warps == 1 or 32 * config.num_warps <= elements
    return is_wide_enough and heads < 2 * int(shape["num_heads"])


KERNEL = Kernel(
    name="rope_store_kv",
    function=_rope_store_kv_kernel,
    configs=tuple(
        Config(constants={"HEADS": heads}, num_warps=warps)
        for heads, warps in ((8, 2), (16, 4), (8, 4), (4, 1), (1, 1))
    ),
    accepts=_accepts,
)


def rope_store_kv(
    qkv_TNh: torch.Tensor,
    cos_T1h: torch.Tensor,
    sin_T1h: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    head_norm_Nh: torch.Tensor | None = None,
    eps: float = 0.0,
    rows_T2Kh: torch.Tensor | None = None,
    stage_N2Kbh: torch.Tensor | None = None,
    stage_slots_T: torch.Tensor | None = None,
    choices: Choices = UNMEASURED,
) -> None:
    """Rotates the queries in qkv in place, and stores the keys, rotated, and the values.

    cos, sin: rows of engine.model.rope.Rope.  slots: int64, all different.
    head_norm, eps: the norm of each query and key head, fp32.
    rows: contiguous, one per token.
    stage, stage_slots: both or neither. Blocks like the cache's; int64, all different but for -1: nowhere.
    The element types of rows and stage may differ from the cache's.
    """
    launch = rope_store_kv_launch(
        qkv_TNh,
        cos_T1h,
        sin_T1h,
        cache_N2Kbh,
        slots_T,
        num_heads=num_heads,
        head_norm_Nh=head_norm_Nh,
        eps=eps,
        rows_T2Kh=rows_T2Kh,
        stage_N2Kbh=stage_N2Kbh,
        stage_slots_T=stage_slots_T,
    )
    choices.run(launch)


def rope_store_kv_launch(
    qkv_TNh: torch.Tensor,
    cos_T1h: torch.Tensor,
    sin_T1h: torch.Tensor,
    cache_N2Kbh: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    head_norm_Nh: torch.Tensor | None = None,
    eps: float = 0.0,
    rows_T2Kh: torch.Tensor | None = None,
    stage_N2Kbh: torch.Tensor | None = None,
    stage_slots_T: torch.Tensor | None = None,
) -> Launch:
    """The call as data. Raises ValueError for tensors that the kernel cannot read."""
    _, _, num_kv_heads, block_size, head_dim = cache_N2Kbh.shape
    _check_qkv(qkv_TNh, cache_N2Kbh, num_heads)
    _check_tables(qkv_TNh, cos_T1h, sin_T1h, slots_T)
    _check_options(qkv_TNh, num_heads + num_kv_heads, head_norm_Nh, rows_T2Kh)
    _check_stage(cache_N2Kbh, slots_T, stage_N2Kbh, stage_slots_T)
    return Launch(
        kernel=KERNEL,
        grid=lambda constants: (
            len(qkv_TNh),
            triton.cdiv(num_heads, constants["HEADS"]) + triton.cdiv(num_kv_heads, constants["HEADS"]),
        ),
        arguments={
            "qkv_ptr": qkv_TNh,
            "cos_ptr": cos_T1h,
            "sin_ptr": sin_T1h,
            "norm_ptr": head_norm_Nh,
            "cache_ptr": cache_N2Kbh,
            "slots_ptr": slots_T,
            "rows_ptr": rows_T2Kh,
            "stage_ptr": stage_N2Kbh,
            "stage_slots_ptr": stage_slots_T,
            "eps": eps,
            "qkv_token_stride": qkv_TNh.stride(0),
            "qkv_head_stride": qkv_TNh.stride(1),
            "cos_stride": cos_T1h.stride(0),
            "sin_stride": sin_T1h.stride(0),
            **_strides("cache", cache_N2Kbh),
            **_strides("stage", stage_N2Kbh),
        },
        constants={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "HAS_NORM": head_norm_Nh is not None,
            "HAS_ROWS": rows_T2Kh is not None,
            "HAS_STAGE": stage_N2Kbh is not None,
            "HALF_BLOCK": triton.next_power_of_2(head_dim // 2),
        },
        shape=(
            ("num_heads", num_heads),
            *_cache_shape(cache_N2Kbh),
            ("head_norm", int(head_norm_Nh is not None)),
            *_types(qkv=qkv_TNh, cache=cache_N2Kbh, rows=rows_T2Kh, stage=stage_N2Kbh),
        ),
    )


def _cache_shape(cache_N2Kbh: torch.Tensor) -> Shape:
    return tuple(zip(("num_kv_heads", "block_size", "head_dim"), cache_N2Kbh.shape[2:], strict=True))


def _types(**tensors: torch.Tensor | None) -> Shape:
    return tuple((name, "none" if tensor is None else type_name(tensor)) for name, tensor in tensors.items())


def _strides(name: str, blocks_N2Kbh: torch.Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0, 0, 0) if blocks_N2Kbh is None else blocks_N2Kbh.stride()
    return {
        f"{name}_block_stride": strides[0],
        f"{name}_kv_stride": strides[1],
        f"{name}_head_stride": strides[2],
        f"{name}_slot_stride": strides[3],
    }


def _check_qkv(qkv_TNh: torch.Tensor, cache_N2Kbh: torch.Tensor, num_heads: int) -> None:
    _, kv, num_kv_heads, _, head_dim = cache_N2Kbh.shape
    if qkv_TNh.dtype not in _DTYPES or cache_N2Kbh.dtype not in _DTYPES:
        raise ValueError(f"qkv and cache must be floating point: {qkv_TNh.dtype}, {cache_N2Kbh.dtype}")
    if kv != 2 or qkv_TNh.shape[1:] != (num_heads + 2 * num_kv_heads, head_dim):
        raise ValueError(
            f"qkv {tuple(qkv_TNh.shape)} must have {num_heads} heads of q and those of k and v of the cache "
            f"{tuple(cache_N2Kbh.shape)}"
        )
    if head_dim % 2 or qkv_TNh.stride(2) != 1 or cache_N2Kbh.stride(4) != 1:
        raise ValueError("heads must be contiguous and of even size in qkv and in the cache")


def _check_tables(
    qkv_TNh: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor, slots_T: torch.Tensor
) -> None:
    num_tokens, _, head_dim = qkv_TNh.shape
    for table in (cos_T1h, sin_T1h):
        is_fp32 = table.dtype == torch.float32 and table.stride(2) == 1
        if not is_fp32 or table.shape != (num_tokens, 1, head_dim):
            raise ValueError(
                f"cos and sin must be float32, [{num_tokens}, 1, {head_dim}], with contiguous rows"
            )
    if slots_T.dtype != torch.int64 or slots_T.shape != (num_tokens,) or not slots_T.is_contiguous():
        raise ValueError(f"slots must be int64, [{num_tokens}], contiguous")


def _check_options(
    qkv_TNh: torch.Tensor,
    num_normed: int,
    head_norm_Nh: torch.Tensor | None,
    rows_T2Kh: torch.Tensor | None,
) -> None:
    num_tokens, num_rows, head_dim = qkv_TNh.shape
    if head_norm_Nh is not None:
        is_fp32 = head_norm_Nh.dtype == torch.float32 and head_norm_Nh.is_contiguous()
        if not is_fp32 or head_norm_Nh.shape != (num_normed, head_dim):
            raise ValueError(f"head_norm must be float32, [{num_normed}, {head_dim}], contiguous")
    if rows_T2Kh is not None:
        wanted = (num_tokens, 2, num_rows - num_normed, head_dim)
        if rows_T2Kh.shape != wanted or not rows_T2Kh.is_contiguous():
            raise ValueError(f"rows are {tuple(rows_T2Kh.shape)}; they must be {wanted}, contiguous")
        if rows_T2Kh.dtype not in _DTYPES:
            raise ValueError(f"rows are {rows_T2Kh.dtype}; they must be floating point")


def _check_stage(
    cache_N2Kbh: torch.Tensor,
    slots_T: torch.Tensor,
    stage_N2Kbh: torch.Tensor | None,
    stage_slots_T: torch.Tensor | None,
) -> None:
    if stage_N2Kbh is None or stage_slots_T is None:
        if stage_N2Kbh is not None or stage_slots_T is not None:
            raise ValueError("a stage and its slots come together")
        return
    if stage_N2Kbh.shape[1:] != cache_N2Kbh.shape[1:] or stage_N2Kbh.stride(4) != 1:
        raise ValueError(
            f"blocks of the stage {tuple(stage_N2Kbh.shape)} must be like those of the cache "
            f"{tuple(cache_N2Kbh.shape)}, their heads contiguous"
        )
    if stage_N2Kbh.dtype not in _DTYPES:
        raise ValueError(f"the stage is {stage_N2Kbh.dtype}; it must be floating point")
    is_like = stage_slots_T.dtype == slots_T.dtype and stage_slots_T.shape == slots_T.shape
    if not is_like or not stage_slots_T.is_contiguous():
        raise ValueError(f"stage_slots must be int64, {tuple(slots_T.shape)}, contiguous")
