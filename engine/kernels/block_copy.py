"""Blocks of the cache to one buffer and back, with any change of layout and element type.

    gather:   wire[i] = cache[block_ids[i]]
    scatter:  cache[block_ids[i]] = wire[i]
    checksum[i] = sum over e of bits(wire[i, e]) * weight(e),  modulo 2^64

e counts a block's elements in the order [L, 2, K, b, h] whatever the layouts are, and the bits are those of
the wire's side: both ends of a transfer compute the same. weight(e) is 32 bits that look random, different
for each e and never 0. So one element that changes always changes the checksum, and so do two different ones
that trade places: the change is a product of two numbers between 0 and 2^32. Other errors should go unseen
about once in 2^32 times. It finds accidents in memory that no host has seen; it is no protection from intent.
Transfers do not ask for it: what goes over the network has a checksum of the host's.

Values change type by the rules of engine/kernels/kv_range.py. Without a change of type, bits stay the same.

Layout: cache [N, L, 2, K, b, h] and wire [n, L, 2, K, b, h], any strides.
Grid: for each block, layer and side (keys or values) its K * b * h elements in tiles of ELEMENTS. Offsets in
memory are int64. Tiles add to their block's checksum, if there is one: the order of integer additions changes
nothing.

Shape suffixes: N blocks of the cache, n blocks of the copy, L layers, K kv heads, b block_size, h head_dim.
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
from engine.model.kv_range import narrowed as narrowed_reference

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
# Odd, so that multiplication modulo 2^32 loses nothing; from the finalizer of MurmurHash3.
_FIRST, _SECOND = tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35)
_MASK = (1 << 32) - 1


def gather_blocks_reference(
    cache_NL2Kbh: torch.Tensor, block_ids_n: torch.Tensor, out_nL2Kbh: torch.Tensor
) -> torch.Tensor:
    """gather_blocks() in plain torch; returns the checksums."""
    out_nL2Kbh.copy_(narrowed_reference(cache_NL2Kbh[block_ids_n], out_nL2Kbh.dtype))
    return checksums_reference(out_nL2Kbh)


def scatter_blocks_reference(
    blocks_nL2Kbh: torch.Tensor, block_ids_n: torch.Tensor, cache_NL2Kbh: torch.Tensor
) -> torch.Tensor:
    """scatter_blocks() in plain torch; returns the checksums."""
    cache_NL2Kbh[block_ids_n] = narrowed_reference(blocks_nL2Kbh, cache_NL2Kbh.dtype)
    return checksums_reference(blocks_nL2Kbh)


def checksums_reference(blocks_nL2Kbh: torch.Tensor) -> torch.Tensor:
    """The checksums of blocks on the wire's side: [n] int64."""
    element_bits = 8 * blocks_nL2Kbh.dtype.itemsize
    bits = (
        blocks_nL2Kbh.contiguous().view(_BITS[blocks_nL2Kbh.dtype]).flatten(1).long()
        & (1 << element_bits) - 1
    )
    weight = (torch.arange(bits.shape[1], device=bits.device) + 1) * _FIRST.value & _MASK
    weight = (weight ^ weight >> 15) * _SECOND.value & _MASK
    weight ^= weight >> 13
    checksums_n: torch.Tensor = (bits * weight).sum(dim=1)
    return checksums_n


@triton.jit
def _checksum(values, elements):
    # Of one tile, uint64. elements: [ELEMENTS] int32, where each value lies in its block; values: 0 outside.
    # Each line maps 32 bits to 32 bits one to one, and 0 to 0.
    weight = (elements + 1).to(tl.uint32) * _FIRST
    weight = (weight ^ (weight >> 15)) * _SECOND
    weight = weight ^ (weight >> 13)
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.uint16, bitcast=True)
    else:
        bits = values.to(tl.uint32, bitcast=True)
    return tl.sum(bits.to(tl.uint64) * weight.to(tl.uint64), axis=0)


# A transfer's frames have any number of layers: compiled once for all.
@triton.jit(do_not_specialize=["num_layers"])
def _copy_kernel(
    cache_ptr,
    wire_ptr,
    block_ids_ptr,
    checksums_ptr,
    cache_block_stride,
    cache_layer_stride,
    cache_kv_stride,
    cache_head_stride,
    cache_slot_stride,
    cache_column_stride,
    wire_block_stride,
    wire_layer_stride,
    wire_kv_stride,
    wire_head_stride,
    wire_slot_stride,
    wire_column_stride,
    num_layers,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_GATHER: tl.constexpr,
    HAS_CHECKSUM: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    SIDE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    TILES: tl.constexpr = (SIDE + ELEMENTS - 1) // ELEMENTS
    program = tl.program_id(0)
    tile, side = program % TILES, program // TILES
    index, side = (side // (2 * num_layers)).to(tl.int64), side % (2 * num_layers)
    layer, kv = (side // 2).to(tl.int64), (side % 2).to(tl.int64)
    block = tl.load(block_ids_ptr + index).to(tl.int64)
    cache_ptr += block * cache_block_stride + layer * cache_layer_stride + kv * cache_kv_stride
    wire_ptr += index * wire_block_stride + layer * wire_layer_stride + kv * wire_kv_stride

    elements = tile * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = elements < SIDE
    rows = elements // HEAD_DIM
    column = (elements % HEAD_DIM).to(tl.int64)
    head, slot = (rows // BLOCK_SIZE).to(tl.int64), (rows % BLOCK_SIZE).to(tl.int64)
    cache_ptr += head * cache_head_stride + slot * cache_slot_stride + column * cache_column_stride
    wire_ptr += head * wire_head_stride + slot * wire_slot_stride + column * wire_column_stride
    if IS_GATHER:
        wire = narrowed(tl.load(cache_ptr, mask=inside, other=0.0), wire_ptr.dtype.element_ty)
        tl.store(wire_ptr, wire, mask=inside)
    else:
        wire = tl.load(wire_ptr, mask=inside, other=0.0)
        tl.store(cache_ptr, narrowed(wire, cache_ptr.dtype.element_ty), mask=inside)
    if HAS_CHECKSUM:
        checksum = _checksum(wire, side * SIDE + elements).to(tl.int64, bitcast=True)
        tl.atomic_add(checksums_ptr + index, checksum, sem="relaxed")


def _accepts(shape: Mapping[str, int | str], config: Config) -> bool:
    # The smallest tile suits all; a larger one should not be more than half empty.
    elements = config.constants["ELEMENTS"]
    side = math.prod(int(shape[name]) for name in ("num_kv_heads", "block_size", "head_dim"))
    return elements <= 1024 or elements < 2 * side


KERNEL = Kernel(
    name="block_copy",
    function=_copy_kernel,
    configs=tuple(
        Config(constants={"ELEMENTS": elements}, num_warps=warps)
        for elements, warps in ((4096, 4), (4096, 8), (2048, 4), (8192, 8), (1024, 4))
    ),
    accepts=_accepts,
)


def gather_blocks(
    cache_NL2Kbh: torch.Tensor,
    block_ids_n: torch.Tensor,
    out_nL2Kbh: torch.Tensor,
    checksums_n: torch.Tensor | None = None,
    *,
    choices: Choices = UNMEASURED,
) -> None:
    """Copies blocks of the cache into a buffer.

    block_ids: int32 or int64.
    checksums: [n] int64, to which those of what is in the buffer then are added; None: none are computed.
    """
    choices.run(gather_blocks_launch(cache_NL2Kbh, block_ids_n, out_nL2Kbh, checksums_n))


def scatter_blocks(
    blocks_nL2Kbh: torch.Tensor,
    block_ids_n: torch.Tensor,
    cache_NL2Kbh: torch.Tensor,
    checksums_n: torch.Tensor | None = None,
    *,
    choices: Choices = UNMEASURED,
) -> None:
    """Copies a buffer into blocks of the cache.

    block_ids: int32 or int64, all different.
    checksums: as of gather_blocks(). A wrong one is known when the blocks are written already.
    """
    choices.run(scatter_blocks_launch(blocks_nL2Kbh, block_ids_n, cache_NL2Kbh, checksums_n))


def gather_blocks_launch(
    cache_NL2Kbh: torch.Tensor,
    block_ids_n: torch.Tensor,
    out_nL2Kbh: torch.Tensor,
    checksums_n: torch.Tensor | None = None,
) -> Launch:
    """The call as data. Raises ValueError for tensors that the kernel cannot read."""
    return _launch(cache_NL2Kbh, out_nL2Kbh, block_ids_n, checksums_n, direction="gather")


def scatter_blocks_launch(
    blocks_nL2Kbh: torch.Tensor,
    block_ids_n: torch.Tensor,
    cache_NL2Kbh: torch.Tensor,
    checksums_n: torch.Tensor | None = None,
) -> Launch:
    """The call as data. Raises ValueError for tensors that the kernel cannot read."""
    return _launch(cache_NL2Kbh, blocks_nL2Kbh, block_ids_n, checksums_n, direction="scatter")


def _launch(
    cache_NL2Kbh: torch.Tensor,
    wire_nL2Kbh: torch.Tensor,
    block_ids_n: torch.Tensor,
    checksums_n: torch.Tensor | None,
    *,
    direction: str,
) -> Launch:
    _check(cache_NL2Kbh, wire_nL2Kbh, block_ids_n, checksums_n)
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = wire_nL2Kbh.shape
    side = num_kv_heads * block_size * head_dim
    return Launch(
        kernel=KERNEL,
        grid=lambda constants: (num_blocks * num_layers * 2 * triton.cdiv(side, constants["ELEMENTS"]),),
        arguments={
            "cache_ptr": cache_NL2Kbh,
            "wire_ptr": wire_nL2Kbh,
            "block_ids_ptr": block_ids_n,
            "checksums_ptr": checksums_n,
            **_strides("cache", cache_NL2Kbh),
            **_strides("wire", wire_nL2Kbh),
            "num_layers": num_layers,
        },
        constants={
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "IS_GATHER": direction == "gather",
            "HAS_CHECKSUM": checksums_n is not None,
        },
        shape=(
            ("direction", direction),
            ("num_kv_heads", num_kv_heads),
            ("block_size", block_size),
            ("head_dim", head_dim),
            ("cache_dtype", type_name(cache_NL2Kbh)),
            ("wire_dtype", type_name(wire_nL2Kbh)),
            ("checksum", int(checksums_n is not None)),
        ),
    )


def _strides(name: str, blocks: torch.Tensor) -> dict[str, int]:
    dimensions = ("block", "layer", "kv", "head", "slot", "column")
    return {f"{name}_{dimension}_stride": blocks.stride(i) for i, dimension in enumerate(dimensions)}


def _check(
    cache_NL2Kbh: torch.Tensor,
    wire_nL2Kbh: torch.Tensor,
    block_ids_n: torch.Tensor,
    checksums_n: torch.Tensor | None,
) -> None:
    if cache_NL2Kbh.dtype not in _BITS or wire_nL2Kbh.dtype not in _BITS:
        raise ValueError(f"blocks must be floating point: {cache_NL2Kbh.dtype}, {wire_nL2Kbh.dtype}")
    wanted = (len(block_ids_n), *cache_NL2Kbh.shape[1:])
    if cache_NL2Kbh.dim() != 6 or cache_NL2Kbh.shape[2] != 2 or wire_nL2Kbh.shape != wanted:
        raise ValueError(f"the buffer is {tuple(wire_nL2Kbh.shape)}; for the cache it must be {wanted}")
    if block_ids_n.dtype not in (torch.int32, torch.int64) or not block_ids_n.is_contiguous():
        raise ValueError(f"block_ids must be int32 or int64, contiguous; they are {block_ids_n.dtype}")
    if checksums_n is None:
        return
    if checksums_n.dtype != torch.int64 or checksums_n.shape != block_ids_n.shape:
        raise ValueError(f"checksums must be int64, [{len(block_ids_n)}]; they are {checksums_n.dtype}")
