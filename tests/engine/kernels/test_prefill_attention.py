"""Prefill attention over the paged cache against a dense masked softmax in fp64, over awkward shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.choices import UNMEASURED, Choices
from engine.kernels.kernel import Config
from engine.kernels.prefill_attention import (
    KERNEL,
    prefill_attention,
    prefill_attention_launch,
    prefill_attention_reference,
)
from engine.kernels.sequences import Sequences
from tests.engine.model.paged_attention import exact_attention

GUARD = 7.0
SCALE = 0.31
# First token to compute and end, of each sequence.
Spans = Sequence[tuple[int, int]]


class Prompts:
    """Random queries, keys and values.

    The cache is NaN where no token is; tables are nonsense behind a sequence's blocks.
    q_THh: a view of rows that are wider.  out_THh: a view, with GUARD around and in it.
    """

    def __init__(
        self,
        spans: Spans,
        *,
        heads: tuple[int, int] = (3, 1),
        head_dim: int = 16,
        block_size: int = 16,
        layout: str = "HND",
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.spans, self.block_size = spans, block_size
        self.group = heads[0] // heads[1]
        generator = torch.Generator().manual_seed(head_dim)
        lengths = [end - first for first, end in spans]
        self.starts = np.cumsum([0, *lengths]).astype(np.int32)
        qkv = torch.randn(sum(lengths), heads[0] + 2, head_dim, generator=generator).to(dtype)
        self.q_THh = qkv[:, 1 : 1 + heads[0]]
        self.kv = [
            torch.randn(2, heads[1], end, head_dim, generator=generator).to(cache_dtype or dtype)
            for _, end in spans
        ]
        counts = [-(-end // block_size) for _, end in spans]
        shape = [sum(counts) + 2, 2, heads[1], block_size, head_dim]
        if layout == "NHD":
            shape[2:4] = block_size, heads[1]
        cache = torch.full(shape, torch.nan, dtype=cache_dtype or dtype)
        self.cache_N2Kbh = cache if layout == "HND" else cache.transpose(2, 3)
        free = torch.randperm(shape[0], generator=generator).tolist()
        self.tables = np.full((len(spans), max(counts) + 1), 2**30, np.int32)
        for row, count in zip(self.tables, counts, strict=True):
            row[:count] = [free.pop() for _ in range(count)]
        self.memory = torch.full((sum(lengths) + 2, heads[0] + 2, head_dim + 3), GUARD, dtype=dtype)
        self.out_THh = self.memory[1:-1, 1:-1, 1:-2]

    def sequences(self, members: Sequence[int] | None = None) -> Sequences:
        rows = np.array(range(len(self.spans)) if members is None else members)
        ends = np.array([end for _, end in self.spans], np.int32)
        lengths = np.diff(self.starts)
        device = torch.device("cpu")
        return Sequences.of_arrays(self.starts[rows], lengths[rows], ends[rows], self.tables[rows], device)

    def store(self) -> None:
        """Puts keys and values into their slots, one by one."""
        for table, kv_2KCh in zip(self.tables, self.kv, strict=True):
            for position in range(kv_2KCh.shape[2]):
                block, offset = table[position // self.block_size], position % self.block_size
                self.cache_N2Kbh[block, :, :, offset] = kv_2KCh[:, :, position]

    def run(
        self,
        members: Sequence[int] | None = None,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        choices: Choices = UNMEASURED,
    ) -> None:
        self.store()
        arguments = (self.q_THh, self.cache_N2Kbh, self.sequences(members), self.out_THh)
        prefill_attention(*arguments, scale=SCALE, window=window, soft_cap=soft_cap, choices=choices)

    def rows(self, index: int) -> slice:
        return slice(*self.starts[index : index + 2])

    def expected(self, index: int, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
        k_CKh, v_CKh = self.kv[index].transpose(1, 2)
        return exact_attention(self.q_THh[self.rows(index)], k_CKh, v_CKh, window, SCALE, soft_cap=soft_cap)

    def check(self, *, window: int = 0, soft_cap: float = 0.0, tolerance: float = 1e-5) -> None:
        for index in range(len(self.spans)):
            actual, expected = self.out_THh[self.rows(index)], self.expected(index, window, soft_cap)
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)

    def is_guarded(self) -> bool:
        outside = self.memory.clone()
        outside[1:-1, 1:-1, 1:-2] = GUARD
        return bool((outside == GUARD).all())


WHOLE = [(0, length) for length in (1, 15, 16, 17, 63, 257)]
# Chunks behind a cached prefix; one sequence has no new token.
CHUNKS = [(16, 33), (0, 3), (9, 9), (63, 64), (40, 130)]


@pytest.mark.parametrize(
    ("spans", "heads", "head_dim", "block_size", "layout"),
    [
        (WHOLE, (3, 1), 80, 16, "HND"),
        (WHOLE, (2, 2), 96, 32, "NHD"),
        (CHUNKS, (12, 3), 96, 16, "NHD"),
        (CHUNKS, (28, 4), 64, 32, "HND"),
        (CHUNKS, (20, 1), 128, 64, "NHD"),
        (CHUNKS[:3], (64, 8), 80, 32, "HND"),
        (CHUNKS[:3], (2, 1), 256, 128, "HND"),
    ],
)
def test_equals_dense_attention_and_touches_nothing_else(
    spans: Spans, heads: tuple[int, int], head_dim: int, block_size: int, layout: str
) -> None:
    prompts = Prompts(spans, heads=heads, head_dim=head_dim, block_size=block_size, layout=layout)

    prompts.run()

    prompts.check()
    assert prompts.is_guarded()


@pytest.mark.parametrize("config", KERNEL.configs, ids=str)
@pytest.mark.parametrize("window", [0, 20])
def test_every_configuration_computes_the_same(config: Config, window: int) -> None:
    prompts = Prompts([(70, 140), (0, 10)], heads=(3, 1), block_size=16 if window else 128)
    launch = prefill_attention_launch(
        prompts.q_THh, prompts.cache_N2Kbh, prompts.sequences(), prompts.out_THh, scale=SCALE, window=window
    )

    prompts.run(window=window, choices=Choices({(KERNEL.name, launch.shape): config}))

    prompts.check(window=window)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float16")]
)
@pytest.mark.parametrize(("group", "new_tokens"), [(1, 16), (7, 16), (1, 4096), (71, 64)])
def test_every_shape_has_a_configuration(
    head_dim: int, dtype: str, kv_dtype: str, group: int, new_tokens: int
) -> None:
    shape = (
        ("head_dim", head_dim),
        ("group", group),
        ("dtype", dtype),
        ("kv_dtype", kv_dtype),
        ("new_tokens", new_tokens),
    )

    rows = [config.constants["BLOCK_M"] for config in KERNEL.configs_for(shape)]

    # Never more rows than a sequence can fill, beyond the smallest tile there is.
    assert max(rows) <= max(32, new_tokens * group)


@pytest.mark.parametrize("window", [1, 4, 16, 100, 300])
def test_a_window_counts_the_keys_that_a_query_sees(window: int) -> None:
    prompts = Prompts([(0, 12), (30, 150)], heads=(2, 1))

    prompts.run(window=window)

    prompts.check(window=window)


@pytest.mark.parametrize("first", [0, 5])
def test_a_window_of_four_sees_the_last_four(first: int) -> None:
    prompts = Prompts([(first, 12)], heads=(1, 1))
    prompts.kv[0][1, 0] = torch.eye(12, 16)

    prompts.run(window=4)

    seen = [torch.nonzero(row[0]).flatten().tolist() for row in prompts.out_THh]
    assert seen == [list(range(max(0, row - 3), row + 1)) for row in range(first, 12)]


@pytest.mark.parametrize(
    "heads", [(8, 2), (28, 4), (12, 3), (32, 8), (64, 8), (8, 1), (8, 8), (71, 1)], ids=str
)
def test_query_heads_read_the_kv_head_of_their_group(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    prompts = Prompts([(0, 2)], heads=heads)
    for head in range(num_kv_heads):
        prompts.kv[0][1, head] = head + 1

    prompts.run()

    expected = torch.arange(1.0, num_kv_heads + 1).repeat_interleave(num_heads // num_kv_heads)
    torch.testing.assert_close(prompts.out_THh, expected[None, :, None].expand_as(prompts.out_THh))
    assert prompts.is_guarded()


def test_scores_are_capped() -> None:
    prompts = Prompts([(0, 40), (50, 70)])
    # Some far beyond the cap, of either sign.
    prompts.q_THh[::3] *= 100

    prompts.run(soft_cap=2.5)

    prompts.check(soft_cap=2.5, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2**-9), (torch.bfloat16, 2**-6)], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_and_caches_of_another(
    dtype: torch.dtype, tolerance: float, cache_dtype: torch.dtype
) -> None:
    prompts = Prompts([(0, 33), (64, 90)], head_dim=80, dtype=dtype, cache_dtype=cache_dtype)

    prompts.run()

    prompts.check(tolerance=tolerance)


def test_values_beyond_the_range_of_the_queries_type_become_its_largest() -> None:
    prompts = Prompts([(0, 4)], dtype=torch.float16, cache_dtype=torch.bfloat16)
    prompts.kv[0][1] = -1e5

    prompts.run()

    assert (prompts.out_THh == -65504).all()


def test_scores_beyond_fp16_are_fp32() -> None:
    # 16 products of 100 * 100 are 160,000.
    prompts = Prompts([(0, 3)], heads=(1, 1), dtype=torch.float16)
    prompts.q_THh[:] = 100
    prompts.kv[0][0] = 100

    prompts.run()

    mean = prompts.kv[0][1, 0].double().cumsum(0) / torch.arange(1, 4)[:, None]
    torch.testing.assert_close(prompts.out_THh[:, 0].double(), mean, rtol=2**-10, atol=2**-12)


def test_only_rows_of_the_given_sequences_are_written() -> None:
    prompts = Prompts([(0, 5), (0, 20), (3, 9)])

    prompts.run(members=[1])

    actual = prompts.out_THh[prompts.rows(1)].double()
    torch.testing.assert_close(actual, prompts.expected(1), rtol=1e-5, atol=1e-5)
    others = torch.cat([prompts.out_THh[prompts.rows(index)] for index in (0, 2)])
    assert (others == GUARD).all()


def test_a_key_that_is_not_a_number_reaches_those_who_see_it_and_no_others() -> None:
    prompts = Prompts([(0, 20), (0, 20)])
    prompts.kv[0][0, :, 7] = torch.nan

    prompts.run()

    is_nan = prompts.out_THh.isnan().all(dim=2).all(dim=1)
    assert is_nan.tolist() == [row in range(7, 20) for row in range(40)]
    assert prompts.out_THh[:7].isfinite().all()


def test_a_second_call_equals_the_first() -> None:
    prompts = Prompts([(0, 20)])
    prompts.run()
    first = prompts.out_THh.clone()

    prompts.run()

    assert torch.equal(prompts.out_THh, first)


def test_the_reference_is_dense_attention() -> None:
    prompts = Prompts(CHUNKS, layout="NHD")
    prompts.store()
    arguments = (prompts.q_THh, prompts.cache_N2Kbh, prompts.sequences(), prompts.out_THh)

    prefill_attention_reference(*arguments, scale=SCALE, window=30, soft_cap=3.0)

    prompts.check(window=30, soft_cap=3.0)


def sparse(path: Path, num_elements: int) -> torch.Tensor:
    """float16 zeros in a file of which only pages that are written take space."""
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=2 * num_elements)
    return torch.tensor([], dtype=torch.float16).set_(storage)  # type: ignore[call-overload]


# Tiles of several blocks, and several of one block.
@pytest.mark.parametrize("block_size", [16, 128])
def test_blocks_beyond_two_to_the_31_elements(tmp_path: Path, block_size: int) -> None:
    prompts = Prompts([(0, 20)], heads=(2, 1), block_size=block_size, dtype=torch.float16)
    block_stride, block_id = 16 * 8 * 2 * 128, 70_000
    # Offsets that wrapped would lie as far before the cache; that is mapped, and holds zeros.
    memory = sparse(tmp_path / "cache", 2**32 + block_id * block_stride)
    near = prompts.cache_N2Kbh
    prompts.cache_N2Kbh = memory.as_strided(
        (block_id + 2, *near.shape[1:]), (block_stride, *near.stride()[1:]), 2**31
    )
    prompts.tables[0, :2] = block_id + 1, block_id

    prompts.run()

    assert block_id * block_stride >= 2**31
    prompts.check(tolerance=2**-9)


def test_rows_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    row_stride, before = 2**23 - 16, 260
    prompts = Prompts([(0, before), (0, 3)], heads=(2, 1), dtype=torch.float16)
    for name in ("q_THh", "out_THh"):
        memory = sparse(tmp_path / name, 2**31 + (before + 4) * row_stride)
        far = memory.as_strided(prompts.q_THh.shape, (row_stride, 16, 1), 2**31)
        far[before:] = prompts.q_THh[before:]
        setattr(prompts, name, far)

    prompts.run(members=[1])

    assert before * row_stride >= 2**31
    actual = prompts.out_THh[prompts.rows(1)].double()
    torch.testing.assert_close(actual, prompts.expected(1), rtol=2**-9, atol=2**-9)


def test_what_the_kernel_cannot_take_is_refused() -> None:
    prompts = Prompts([(0, 3)], heads=(4, 2))
    q, cache, out, sequences = prompts.q_THh, prompts.cache_N2Kbh, prompts.out_THh, prompts.sequences()
    with pytest.raises(ValueError, match="out must be as q"):
        prefill_attention(q, cache, sequences, out.half(), scale=1.0)
    with pytest.raises(ValueError, match="cannot serve"):
        prefill_attention(q[:, :3], cache, sequences, out[:, :3], scale=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        prefill_attention(q.mT.contiguous().mT, cache, sequences, out, scale=1.0)
    far = torch.empty_strided(q.shape, (2**23, *q.stride()[1:]), dtype=q.dtype, device="meta")
    with pytest.raises(ValueError, match="elements apart"):
        prefill_attention(far, cache, sequences, out, scale=1.0)
    for wrong in ({"scale": 0.0}, {"scale": 1.0, "window": -1}, {"scale": 1.0, "soft_cap": -1.0}):
        with pytest.raises(ValueError, match="must be positive"):
            prefill_attention(q, cache, sequences, out, **wrong)
