"""Blocks to a buffer and back against plain indexing, and checksums against their formula in integers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.kernels.block_copy import (
    KERNEL,
    checksums_reference,
    gather_blocks,
    gather_blocks_launch,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_launch,
    scatter_blocks_reference,
)

GUARD = 7.0
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")


def weight(element: int) -> int:
    """What an element's bits are multiplied with, in Python's numbers."""
    mixed = (element + 1) * 0x85EBCA6B % 2**32
    mixed = (mixed ^ mixed >> 15) * 0xC2B2AE35 % 2**32
    return mixed ^ mixed >> 13


def checksum(block: torch.Tensor) -> int:
    """The checksum of one float32 block."""
    values = block.flatten().tolist()
    bits = struct.unpack(f"{len(values)}I", struct.pack(f"{len(values)}f", *values))
    total = sum(bits[element] * weight(element) for element in range(len(bits))) % 2**64
    return total - 2**64 if total >= 2**63 else total


@dataclass(frozen=True, kw_only=True)
class Case:
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    cache_layout: str = "HND"
    wire_layout: str = "HND"
    cache_dtype: torch.dtype = HALF
    wire_dtype: torch.dtype = HALF

    def __str__(self) -> str:
        types = f"{self.cache_dtype}-{self.wire_dtype}".replace("torch.", "")
        layouts = f"{self.cache_layout}-{self.wire_layout}"
        return f"{self.num_kv_heads}-{self.block_size}-{self.head_dim}-{layouts}-{types}"


CASES = [
    Case(num_kv_heads=1, head_dim=80),
    Case(num_kv_heads=3, head_dim=96, cache_layout="NHD", cache_dtype=BF16, wire_dtype=HALF),
    Case(num_kv_heads=4, head_dim=80, block_size=32, wire_layout="NHD", wire_dtype=FP32),
    Case(
        num_kv_heads=8, head_dim=64, cache_layout="NHD", wire_layout="NHD", cache_dtype=BF16, wire_dtype=BF16
    ),
    # One side is no whole number of tiles, and less than one.
    Case(num_kv_heads=5, head_dim=6, cache_dtype=FP32, wire_dtype=HALF, wire_layout="LAST"),
]


def blocks_of(
    case: Case, layout: str, num_blocks: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of 2 layers, seen as [n, 2, 2, K, b, h], and all of their memory with GUARD around them.

    Layout LAST has the blocks innermost: no dimension is contiguous where kernels like it.
    """
    heads, slots, columns = case.num_kv_heads, case.block_size, case.head_dim
    physical, order = {
        "HND": ((num_blocks, 2, 2, heads, slots, columns), (0, 1, 2, 3, 4, 5)),
        "NHD": ((num_blocks, 2, 2, slots, heads, columns), (0, 1, 2, 4, 3, 5)),
        "LAST": ((2, 2, heads, slots, columns, num_blocks), (5, 0, 1, 2, 3, 4)),
    }[layout]
    num_elements = num_blocks * 4 * heads * slots * columns
    memory = torch.full((num_elements + 64,), GUARD, dtype=dtype)
    view = memory[32:-32].view(physical).permute(order)
    view.copy_(torch.randn(view.shape))
    return view, memory


def is_framed(memory: torch.Tensor) -> bool:
    return bool((memory[:32] == GUARD).all() and (memory[-32:] == GUARD).all())


def gathered(cache: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """gather_blocks(), and the checksums."""
    checksums = torch.zeros(len(block_ids), dtype=torch.int64)
    gather_blocks(cache, block_ids, out, checksums)
    return checksums


def scattered(blocks: torch.Tensor, block_ids: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """scatter_blocks(), and the checksums."""
    checksums = torch.zeros(len(block_ids), dtype=torch.int64)
    scatter_blocks(blocks, block_ids, cache, checksums)
    return checksums


@pytest.mark.parametrize("operator", [gathered, gather_blocks_reference])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather_equals_indexing(case: Case, operator: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(case.head_dim)
    cache, _ = blocks_of(case, case.cache_layout, 5, case.cache_dtype)
    cache[0], cache[2] = NAN, NAN
    wire, memory = blocks_of(case, case.wire_layout, 3, case.wire_dtype)
    block_ids = torch.tensor([4, 1, 3], dtype=torch.int32)
    before = cache.clone()

    checksums = operator(cache, block_ids, wire)

    assert torch.equal(wire, cache[[4, 1, 3]].to(case.wire_dtype))
    assert is_framed(memory)
    torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(checksums, checksums_reference(wire))


@pytest.mark.parametrize("operator", [scattered, scatter_blocks_reference])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scatter_equals_indexing(case: Case, operator: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(case.head_dim)
    cache, memory = blocks_of(case, case.cache_layout, 5, case.cache_dtype)
    wire, _ = blocks_of(case, case.wire_layout, 3, case.wire_dtype)
    wire_before, expected = wire.clone(), cache.clone()
    expected[[4, 1, 3]] = wire.to(case.cache_dtype)

    checksums = operator(wire, torch.tensor([4, 1, 3]), cache)

    # The interpreter cuts bfloat16 where devices round.
    step = 2**-7 if case.cache_dtype == BF16 else 0.0
    torch.testing.assert_close(cache, expected, rtol=step, atol=0)
    assert is_framed(memory)
    assert torch.equal(wire, wire_before)
    assert torch.equal(checksums, checksums_reference(wire))


@pytest.mark.parametrize("config", KERNEL.configs, ids=str)
def test_every_configuration_does_the_same(config: object) -> None:
    # A side of 3 * 16 * 40 elements is no whole number of any tile.
    cache, wire, back = (
        torch.randn(2, 1, 2, 3, 16, 40),
        torch.zeros(1, 1, 2, 3, 16, 40),
        torch.zeros(2, 1, 2, 3, 16, 40),
    )
    sent, received = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    block_ids = torch.tensor([1])

    gather_blocks_launch(cache, block_ids, wire, sent).run(config)
    scatter_blocks_launch(wire, block_ids, back, received).run(config)

    assert torch.equal(wire[0], cache[1])
    assert torch.equal(back[1], cache[1])
    assert not back[0].any()
    assert sent.tolist() == received.tolist() == [checksum(cache[1])]


def test_nobody_who_does_not_ask_pays_for_a_checksum() -> None:
    cache, wire = torch.randn(4, 2, 2, 3, 16, 8), torch.zeros(2, 2, 2, 3, 16, 8)
    block_ids = torch.tensor([3, 0])
    for launch in (
        gather_blocks_launch(cache, block_ids, wire),
        scatter_blocks_launch(wire, block_ids, cache),
    ):
        assert launch.arguments["checksums_ptr"] is None
        assert not launch.constants["HAS_CHECKSUM"]

    gather_blocks(cache, block_ids, wire)

    assert torch.equal(wire, cache[[3, 0]])
    scatter_blocks(wire + 1, block_ids, cache)
    assert torch.equal(cache[[3, 0]], wire + 1)


def test_both_ends_of_a_transfer_compute_the_same() -> None:
    # bfloat16 at one end in one layout, float16 on the wire, float32 at the other end in the other layout.
    sender, receiver = (
        torch.randn(4, 2, 2, 3, 16, 8).bfloat16(),
        torch.zeros(4, 2, 2, 16, 3, 8).transpose(3, 4),
    )
    wire = torch.empty(2, 2, 2, 3, 16, 8, dtype=HALF)

    sent = gathered(sender, torch.tensor([3, 0]), wire)
    received = scattered(wire, torch.tensor([1, 2]), receiver)

    assert torch.equal(receiver[[1, 2]], sender[[3, 0]].float())
    assert torch.equal(sent, received)
    assert sent[0] != sent[1]


def test_checksums_are_those_of_the_formula() -> None:
    blocks = torch.randn(2, 1, 2, 3, 4, 5)
    expected = [checksum(blocks[0]), checksum(blocks[1])]
    assert checksums_reference(blocks).tolist() == expected
    assert scattered(blocks, torch.tensor([0, 1]), torch.zeros_like(blocks)).tolist() == expected
    # Not the places in memory count, but those in the block.
    turned = blocks.transpose(3, 4).contiguous().transpose(3, 4)
    assert scattered(turned, torch.tensor([0, 1]), torch.zeros_like(blocks)).tolist() == expected


def test_no_two_elements_weigh_the_same_and_none_nothing() -> None:
    # Of each block one element has the bits of 1, so its checksum is that element's weight.
    smallest = torch.eye(1024, dtype=torch.int16).view(HALF).view(1024, 1, 2, 4, 16, 8)
    weights = checksums_reference(smallest).tolist()
    assert weights == [weight(element) for element in range(1024)]
    assert len(set(weights)) == 1024
    assert min(weights) > 0


@pytest.mark.parametrize("dtype", [HALF, FP32])
def test_what_was_moved_or_changed_is_seen(dtype: torch.dtype) -> None:
    block = torch.randn(1, 1, 2, 2, 4, 4).to(dtype)
    bits = block.view(torch.int16 if dtype == HALF else torch.int32)
    changed = {"first bit": bits ^ 1, "roll": bits.roll(1, -1), "heads": bits.flip(3), "tokens": bits.flip(4)}
    changed["keys and values"] = bits.flip(2)
    changed["sign of one zero"] = bits.clone()
    bits[0, 0, 0, 0, 0, 0] = 0
    changed["sign of one zero"][0, 0, 0, 0, 0, 0] = torch.iinfo(bits.dtype).min
    swapped = bits.clone()
    swapped[0, 0, 1, 1, 3, 2:] = bits[0, 0, 1, 1, 3, 2:].flip(0)
    changed["two neighbours"] = swapped
    all_bits = torch.cat((bits, *changed.values()))

    checksums = scattered(
        all_bits.view(dtype), torch.arange(len(all_bits)), torch.zeros_like(all_bits).view(dtype)
    )

    assert len(set(checksums.tolist())) == len(changed) + 1


@pytest.mark.parametrize("gather", [gathered, gather_blocks_reference])
@pytest.mark.parametrize("scatter", [scattered, scatter_blocks_reference])
def test_what_float16_cannot_hold_is_its_largest_number(
    gather: Callable[..., torch.Tensor], scatter: Callable[..., torch.Tensor]
) -> None:
    edges = torch.tensor([65280.0, 65536.0, -65536.0, 3e38, -3e38, INF, -INF, NAN], dtype=BF16)
    wanted = torch.tensor([65280.0, 65504.0, -65504.0, 65504.0, -65504.0, INF, -INF, NAN], dtype=HALF)
    blocks, halves = edges.expand(1, 1, 2, 1, 1, 8), torch.zeros(1, 1, 2, 1, 1, 8, dtype=HALF)
    for copy in (
        lambda: gather(blocks, torch.tensor([0]), halves),
        lambda: scatter(blocks, torch.tensor([0]), halves),
    ):
        halves.zero_()
        copy()
        torch.testing.assert_close(halves[0, 0, 1, 0, 0], wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [HALF, BF16, FP32])
def test_without_a_change_of_type_every_bit_stays(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**15), 2**15, (1, 1, 2, 1, 16, 64), dtype=torch.int16)
    if dtype == FP32:
        bits = bits.int() * 65537
    out = torch.zeros_like(bits)
    gather_blocks(bits.view(dtype), torch.tensor([0]), out.view(dtype))
    assert torch.equal(out, bits)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_blocks_beyond_2_to_the_31_elements(tmp_path: Path, id_dtype: torch.dtype) -> None:
    # 2 layers of 2 * 8 * 16 * 128 elements: block 32,768 begins at element 2^31. Holes take no memory.
    num_blocks = 32770
    storage = torch.UntypedStorage.from_file(str(tmp_path / "cache"), shared=True, nbytes=num_blocks * 2**17)
    cache = torch.empty(0, dtype=HALF).set_(storage).view(num_blocks, 2, 2, 8, 16, 128)
    blocks, out = torch.randn(1, 2, 2, 8, 16, 128).half(), torch.zeros(1, 2, 2, 8, 16, 128, dtype=HALF)
    far = torch.tensor([num_blocks - 1], dtype=id_dtype)

    stored = scattered(blocks, far, cache)
    read = gathered(cache, far, out)

    assert torch.equal(cache[-1:], blocks)
    assert torch.equal(out, blocks)
    assert torch.equal(stored, read)
    assert not cache[:2].any()
    assert not cache[-2].any()


def test_no_blocks_have_no_checksums() -> None:
    none = torch.zeros(0, 1, 2, 1, 4, 4)
    assert gathered(torch.zeros(2, 1, 2, 1, 4, 4), torch.zeros(0, dtype=torch.int64), none).shape == (0,)


@pytest.mark.parametrize(
    ("wire", "block_ids", "message"),
    [
        (torch.zeros(1, 1, 2, 1, 4, 4), torch.tensor([0, 1]), "must be"),
        (torch.zeros(1, 1, 2, 1, 4, 5), torch.tensor([0]), "must be"),
        (torch.zeros(1, 1, 2, 1, 4, 4, dtype=torch.int16), torch.tensor([0]), "floating point"),
        (torch.zeros(1, 1, 2, 1, 4, 4), torch.tensor([0.0]), "block_ids"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    wire: torch.Tensor, block_ids: torch.Tensor, message: str
) -> None:
    cache = torch.zeros(2, 1, 2, 1, 4, 4)
    with pytest.raises(ValueError, match=message):
        gather_blocks(cache, block_ids, wire)
    with pytest.raises(ValueError, match=message):
        scatter_blocks(wire, block_ids, cache)
