"""Rotation and storing of KV against complex numbers in fp64, over awkward shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.kernels.rope_store_kv import (
    KERNEL,
    rope_store_kv,
    rope_store_kv_launch,
    rope_store_kv_reference,
)

GUARD = 7.0
EPS = 1e-3
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
# The interpreter cuts bfloat16 where devices round: one step instead of a half.
STEP = {HALF: 2**-11, BF16: 2**-7, FP32: 2**-19}


def framed(rows: int, *shape: int, dtype: torch.dtype, gap: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random [rows, *shape] view with `gap` elements between rows, and the memory around it: GUARD."""
    memory = torch.full((rows + 2, math.prod(shape) + gap), GUARD, dtype=dtype)
    view = memory[1:-1, : math.prod(shape)].unflatten(1, shape)
    view.copy_(torch.randn(rows, *shape))
    return view, memory


def tables(angles: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of [T, h / 2] angles, as engine.model.rope.Rope.rows gives them."""
    cos, sin = (factor * angles.cos()).float(), (factor * angles.sin()).float()
    return torch.cat((cos, cos), dim=1)[:, None], torch.cat((-sin, sin), dim=1)[:, None]


def turned(
    heads: torch.Tensor, angles: torch.Tensor, factor: float, norm: torch.Tensor | None
) -> torch.Tensor:
    """Heads normed and rotated in fp64, as complex numbers."""
    heads = heads.double()
    if norm is not None:
        heads = heads / (heads.square().mean(dim=2, keepdim=True) + EPS).sqrt() * norm.double()
    first, second = heads.chunk(2, dim=2)
    rotated = torch.complex(first, second) * torch.polar(torch.tensor(factor).double(), angles)[:, None]
    return torch.cat((rotated.real, rotated.imag), dim=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    layout: str = "HND"
    dtype: torch.dtype = FP32
    cache_dtype: torch.dtype = FP32
    rows_dtype: torch.dtype | None = None
    stage_dtype: torch.dtype | None = None
    stage_layout: str = "HND"
    has_norm: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}-{self.num_heads}/{self.num_kv_heads}-{self.head_dim}-{self.layout}"


CASES = [
    Case(num_tokens=1, num_heads=3, num_kv_heads=1, head_dim=80),
    Case(num_tokens=15, num_heads=3, num_kv_heads=1, head_dim=96, dtype=HALF, cache_dtype=HALF, layout="NHD"),
    Case(num_tokens=16, num_heads=12, num_kv_heads=3, head_dim=80, rows_dtype=HALF, has_norm=True),
    Case(
        num_tokens=17,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        block_size=32,
        layout="NHD",
        dtype=BF16,
        cache_dtype=HALF,
        rows_dtype=BF16,
        stage_dtype=HALF,
        stage_layout="NHD",
    ),
    Case(
        num_tokens=2, num_heads=64, num_kv_heads=8, head_dim=64, dtype=BF16, cache_dtype=BF16, has_norm=True
    ),
    Case(
        num_tokens=63,
        num_heads=3,
        num_kv_heads=1,
        head_dim=256,
        dtype=HALF,
        cache_dtype=FP32,
        stage_dtype=FP32,
        has_norm=True,
    ),
    Case(num_tokens=257, num_heads=3, num_kv_heads=1, head_dim=8, block_size=32, stage_dtype=FP32),
]


def cache_of(case: Case, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of a cache of three, and the whole cache, which is full of GUARD and NaN."""
    heads, slots = case.num_kv_heads, case.block_size
    inner = (heads, slots) if case.layout == "HND" else (slots, heads)
    memory = torch.full((num_blocks, 3, 2, *inner, case.head_dim), GUARD, dtype=case.cache_dtype)
    memory[::2] = NAN
    layer = memory[:, 1]
    return layer.transpose(2, 3) if case.layout == "NHD" else layer, memory


@dataclass(frozen=True)
class Stage:
    """One layer of a stage of three, and the whole stage, which is full of GUARD.

    slots: where tokens go, not in their order; every third token has none.
    """

    layer: torch.Tensor
    memory: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> Stage:
        heads, size = case.num_kv_heads, case.block_size
        num_blocks = case.num_tokens // size + 1
        inner = (heads, size) if case.stage_layout == "HND" else (size, heads)
        memory = torch.full((3, num_blocks, 2, *inner, case.head_dim), GUARD, dtype=dtype)
        slots = torch.randperm(num_blocks * size)[: case.num_tokens]
        slots[::3] = -1
        return cls(memory[1].transpose(2, 3) if case.stage_layout == "NHD" else memory[1], memory, slots)

    def take(self) -> torch.Tensor:
        """What it has of the tokens with a slot; GUARD is there then."""
        slots, size = self.slots[self.slots >= 0], self.layer.shape[3]
        taken = self.layer[slots // size, :, :, slots % size]
        self.layer[slots // size, :, :, slots % size] = GUARD
        return taken


@pytest.mark.parametrize("operator", [rope_store_kv, rope_store_kv_reference])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_complex_rotation_and_touches_nothing_else(case: Case, operator: Callable[..., None]) -> None:
    torch.manual_seed(case.num_tokens)
    num_tokens, num_heads, num_kv_heads = case.num_tokens, case.num_heads, case.num_kv_heads
    shape = (num_heads + 2 * num_kv_heads, case.head_dim)
    qkv, qkv_memory = framed(num_tokens, *shape, dtype=case.dtype, gap=16)
    angles = torch.rand(num_tokens, case.head_dim // 2, dtype=torch.float64) * 20
    norm = torch.rand(num_heads + num_kv_heads, case.head_dim) + 0.5 if case.has_norm else None
    num_blocks = num_tokens // case.block_size + 3
    slots = torch.randperm(num_blocks * case.block_size)[:num_tokens]
    cache, cache_memory = cache_of(case, num_blocks)
    rows, rows_memory = None, torch.zeros(0)
    if case.rows_dtype is not None:
        rows, rows_memory = framed(num_tokens, 2, num_kv_heads, case.head_dim, dtype=case.rows_dtype)
    stage = None if case.stage_dtype is None else Stage.of(case, case.stage_dtype)
    heads = turned(qkv[:, : num_heads + num_kv_heads], angles, 1.25, norm)
    kv = torch.stack((heads[:, num_heads:], qkv[:, num_heads + num_kv_heads :].double()), dim=1)
    kv_before = qkv[:, num_heads:].clone()
    cache_before = cache_memory.clone()

    operator(
        qkv,
        *tables(angles, 1.25),
        cache,
        slots,
        num_heads=num_heads,
        head_norm_Nh=norm,
        eps=EPS,
        rows_T2Kh=rows,
        stage_N2Kbh=None if stage is None else stage.layer,
        stage_slots_T=None if stage is None else stage.slots,
    )

    step = STEP[case.dtype]
    torch.testing.assert_close(qkv[:, :num_heads].double(), heads[:, :num_heads], rtol=step, atol=step)
    stored = cache[slots // case.block_size, :, :, slots % case.block_size]
    step = max(STEP[case.dtype], STEP[case.cache_dtype]) * 2
    torch.testing.assert_close(stored.double(), kv, rtol=step, atol=step)
    if rows is not None:
        step = max(STEP[case.dtype], STEP[rows.dtype]) * 2
        torch.testing.assert_close(rows.double(), kv, rtol=step, atol=step)
        assert (rows_memory[[0, -1]] == GUARD).all()
    if stage is not None:
        step = max(STEP[case.dtype], STEP[stage.layer.dtype]) * 2
        staged = stage.take().double()
        torch.testing.assert_close(staged, kv[stage.slots >= 0], rtol=step, atol=step)
        assert (stage.memory == GUARD).all()
    assert torch.equal(qkv[:, num_heads:], kv_before)
    assert (qkv_memory[[0, -1]] == GUARD).all()
    assert (qkv_memory[:, -16:] == GUARD).all()
    cache[slots // case.block_size, :, :, slots % case.block_size] = 0
    before = cache_before[:, 1].transpose(2, 3) if case.layout == "NHD" else cache_before[:, 1]
    before[slots // case.block_size, :, :, slots % case.block_size] = 0
    torch.testing.assert_close(cache_memory, cache_before, rtol=0, atol=0, equal_nan=True)


def small_call(num_tokens: int = 3, dtype: torch.dtype = FP32) -> dict[str, torch.Tensor | int]:
    """Arguments for 3 query heads and 1 kv head of 8 elements; no rotation."""
    cos, sin = tables(torch.zeros(num_tokens, 4))
    return {
        "qkv_TNh": torch.randn(num_tokens, 5, 8).to(dtype),
        "cos_T1h": cos,
        "sin_T1h": sin,
        "cache_N2Kbh": torch.zeros(4, 2, 1, 16, 8, dtype=dtype),
        "slots_T": torch.arange(num_tokens),
        "num_heads": 3,
    }


@pytest.mark.parametrize("config", KERNEL.configs, ids=str)
def test_every_configuration_does_the_same(config: object) -> None:
    # 12 heads in tiles of 8 and 16, 3 in tiles of 8: none of them fits.
    torch.manual_seed(0)
    angles = torch.rand(2, 48, dtype=torch.float64)
    qkv, rows, cache = torch.randn(2, 18, 96), torch.zeros(2, 2, 3, 96), torch.zeros(2, 2, 3, 16, 96)
    stage = torch.zeros(1, 2, 3, 16, 96)
    heads = turned(qkv[:, :15], angles, 1.0, None).float()
    values = qkv[:, 15:].clone()

    rope_store_kv_launch(
        qkv,
        *tables(angles),
        cache,
        torch.tensor([1, 17]),
        num_heads=12,
        rows_T2Kh=rows,
        stage_N2Kbh=stage,
        stage_slots_T=torch.tensor([-1, 9]),
    ).run(config)

    torch.testing.assert_close(qkv[:, :12], heads[:, :12])
    torch.testing.assert_close(cache[[0, 1], :, :, 1], torch.stack((heads[:, 12:], values), dim=1))
    assert torch.equal(rows, cache[[0, 1], :, :, 1])
    assert torch.equal(stage[0, :, :, 9], cache[1, :, :, 1])
    stage[0, :, :, 9] = 0
    assert not stage.any()


def test_a_second_call_turns_queries_again_and_stores_the_same() -> None:
    call = small_call()
    call["cos_T1h"], call["sin_T1h"] = tables(torch.full((3, 4), 0.5, dtype=torch.float64))
    queries = call["qkv_TNh"][:, :3].clone()

    rope_store_kv(**call)
    first = call["cache_N2Kbh"].clone()
    rope_store_kv(**call)

    turned_twice = turned(queries, torch.ones(3, 4, dtype=torch.float64), 1.0, None)
    torch.testing.assert_close(call["qkv_TNh"][:, :3].double(), turned_twice, rtol=1e-5, atol=1e-6)
    assert torch.equal(call["cache_N2Kbh"], first)
    assert first.any()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("operator", [rope_store_kv, rope_store_kv_reference])
def test_infinities_of_float16_are_stored_as_nan(operator: Callable[..., None]) -> None:
    call = small_call(1, HALF)
    qkv = call["qkv_TNh"].fill_(2.0)
    # Twice 60,000 is no float16. A value may be infinite too, by the product before.
    qkv[0, :4, ::7], qkv[0, 4, 1:7:5] = 60000.0, -INF
    call["cos_T1h"], call["sin_T1h"] = tables(torch.zeros(1, 4), 2.0)
    rows, stage = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 16, 8)

    operator(**call, rows_T2Kh=rows, stage_N2Kbh=stage, stage_slots_T=torch.tensor([3]))

    assert call["qkv_TNh"][0, 0].tolist() == [INF, *[4.0] * 6, INF]
    for keys, values in (call["cache_N2Kbh"][0, :, 0, 0], rows[0, :, 0], stage[0, :, 0, 3]):
        assert keys.isnan().tolist() == [True, *[False] * 6, True]
        assert values.isnan().tolist() == [False, True, *[False] * 4, True, False]
        assert (keys[1:7] == 4.0).all()
        assert (values[2:6] == 2.0).all()


@pytest.mark.parametrize("operator", [rope_store_kv, rope_store_kv_reference])
def test_what_a_float16_cache_cannot_hold_is_its_largest_number(operator: Callable[..., None]) -> None:
    call = small_call(1, BF16)
    edges = torch.tensor([65280.0, 65536.0, -65536.0, 3e38, -3e38, INF, -INF, NAN], dtype=BF16)
    call["qkv_TNh"][0, 4] = edges
    call["cache_N2Kbh"] = call["cache_N2Kbh"].half()
    rows, stage = torch.zeros(1, 2, 1, 8, dtype=BF16), torch.zeros(1, 2, 1, 16, 8, dtype=HALF)

    operator(**call, rows_T2Kh=rows, stage_N2Kbh=stage, stage_slots_T=torch.tensor([0]))

    wanted = torch.tensor([65280.0, 65504.0, -65504.0, 65504.0, -65504.0, INF, -INF, NAN], dtype=HALF)
    torch.testing.assert_close(call["cache_N2Kbh"][0, 1, 0, 0], wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(stage[0, 1, 0, 0], wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rows[0, 1, 0], edges, rtol=0, atol=0, equal_nan=True)


def sparse(path: Path, num_elements: int) -> torch.Tensor:
    """Float16 zeros in a file with holes: only what is written to takes memory."""
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=2 * num_elements)
    return torch.empty(0, dtype=HALF).set_(storage)


def test_blocks_beyond_2_to_the_31_elements(tmp_path: Path) -> None:
    # 16 tokens x 8 heads x 128: block 131,072 begins at element 2^32, and block 65,536 at 2^31.
    call = small_call(1, HALF)
    call["qkv_TNh"] = torch.ones(1, 3 + 16, 128, dtype=HALF)
    call["cos_T1h"], call["sin_T1h"] = tables(torch.zeros(1, 64))
    cache = sparse(tmp_path / "cache", 65538 * 2**15).view(65538, 2, 8, 16, 128)
    call["cache_N2Kbh"] = cache
    call["slots_T"] = torch.tensor([65537 * 16 + 5])

    rope_store_kv(**call)

    assert (cache[65537, :, :, 5] == 1).all()
    assert cache[65537].count_nonzero() == 2 * 8 * 128
    assert not cache[:2].any()

    call["cache_N2Kbh"], call["slots_T"] = torch.zeros(1, 2, 8, 16, 128, dtype=HALF), torch.tensor([0])
    rope_store_kv(**call, stage_N2Kbh=cache, stage_slots_T=torch.tensor([65536 * 16 + 15]))

    assert (cache[65536, :, :, 15] == 1).all()
    assert cache[65536].count_nonzero() == 2 * 8 * 128
    assert not cache[:2].any()


def test_rows_beyond_2_to_the_31_elements(tmp_path: Path) -> None:
    memory = sparse(tmp_path / "qkv", 2**31 + 40)
    call = small_call(3, HALF)
    qkv = memory.as_strided((3, 5, 8), (2**30, 8, 1))
    qkv.copy_(call["qkv_TNh"])
    call["qkv_TNh"] = qkv
    call["cos_T1h"], call["sin_T1h"] = tables(torch.zeros(3, 4), 2.0)
    queries, values = qkv[:, :3].clone(), qkv[:, 4].clone()

    rope_store_kv(**call)

    assert torch.equal(qkv[:, :3], 2 * queries)
    assert torch.equal(call["cache_N2Kbh"][0, 1, 0, :3], values)


def test_nothing_is_done_for_no_tokens() -> None:
    call = small_call(0)
    rope_store_kv(**call)
    assert not call["cache_N2Kbh"].any()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_heads", 2, "2 heads of q"),
        ("cos_T1h", torch.zeros(3, 1, 8, dtype=HALF), "cos and sin"),
        ("sin_T1h", torch.zeros(3, 1, 4), "cos and sin"),
        ("slots_T", torch.zeros(3, dtype=torch.int32), "slots must be int64"),
        ("slots_T", torch.zeros(2, dtype=torch.int64), "slots must be int64"),
        ("qkv_TNh", torch.zeros(3, 8, 5).transpose(1, 2), "contiguous"),
        ("qkv_TNh", torch.zeros(3, 5, 8, dtype=torch.int32), "floating point"),
        ("head_norm_Nh", torch.zeros(3, 8), "head_norm"),
        ("rows_T2Kh", torch.zeros(3, 1, 2, 8), "rows are"),
        ("rows_T2Kh", torch.zeros(3, 2, 1, 8, dtype=torch.int32), "floating point"),
        ("stage_slots_T", torch.zeros(3, dtype=torch.int64), "come together"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_store_kv(**(small_call() | {name: value}))


@pytest.mark.parametrize(
    ("stage", "slots", "message"),
    [
        (torch.zeros(4, 2, 1, 16, 8), None, "come together"),
        (torch.zeros(4, 2, 1, 8, 8), torch.zeros(3, dtype=torch.int64), "like those of the cache"),
        (torch.zeros(4, 2, 1, 8, 16).mT, torch.zeros(3, dtype=torch.int64), "heads contiguous"),
        (torch.zeros(4, 2, 1, 16, 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), "floating point"),
        (torch.zeros(4, 2, 1, 16, 8), torch.zeros(3, dtype=torch.int32), "stage_slots"),
        (torch.zeros(4, 2, 1, 16, 8), torch.zeros(6, dtype=torch.int64)[::2], "stage_slots"),
    ],
)
def test_so_is_a_stage_that_is_unlike_the_cache(
    stage: torch.Tensor, slots: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rope_store_kv(**small_call(), stage_N2Kbh=stage, stage_slots_T=slots)
