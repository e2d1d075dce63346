"""Attention of a sequence's newest tokens against dense attention in fp64, over awkward shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.context_splits import REDUCE_KERNEL
from engine.kernels.kernel import Config
from engine.kernels.paged_attention import (
    KERNEL,
    paged_attention,
    paged_attention_launches,
    paged_attention_reference,
)
from engine.kernels.sequences import Sequences

GUARD = 7.0
CPU = torch.device("cpu")
# Interpreted kernels divide 0 by 0 where a split holds nothing that a row sees, as they should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass
class Problem:
    """Sequences with their dense keys and values, and the same in the blocks of a cache full of NaN."""

    lengths: list[int]
    kv: list[torch.Tensor]
    q: torch.Tensor
    cache: torch.Tensor
    sequences: Sequences

    @classmethod
    def of(
        cls,
        heads: tuple[int, int],
        head_dim: int,
        lengths: list[int],
        seq_lens: list[int],
        *,
        block_size: int = 16,
        layout: str = "HND",
        dtype: torch.dtype = torch.float32,
    ) -> Problem:
        generator = torch.Generator().manual_seed(head_dim + sum(seq_lens))
        num_heads, num_kv_heads = heads
        kv = [torch.randn(2, num_kv_heads, n, head_dim, generator=generator).to(dtype) for n in seq_lens]
        # Queries are a part of the qkv product: their rows lie apart.
        qkv = torch.randn(sum(lengths) + 1, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
        num_blocks = [-(-n // block_size) for n in seq_lens]
        cache = empty_cache((sum(num_blocks) + 1, num_kv_heads, block_size, head_dim), layout, dtype)
        # Blocks in no order; columns beyond a sequence's own name blocks that do not exist.
        ids = iter(torch.randperm(sum(num_blocks) + 1, generator=generator).tolist())
        tables = np.full((len(lengths), max(num_blocks) + 1), 2**31 - 1, np.int32)
        for row, dense in enumerate(kv):
            for column, part in enumerate(dense.split(block_size, dim=2) if dense.shape[2] else ()):
                tables[row, column] = next(ids)
                cache[tables[row, column], :, :, : part.shape[2]] = part
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
        sequences = Sequences.of_arrays(
            starts, np.array(lengths, np.int32), np.array(seq_lens, np.int32), tables, CPU
        )
        return cls(lengths, kv, qkv[:, :num_heads].to(dtype), cache, sequences)

    def expected(self, scale: float, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
        """[T, H, h] fp64, token by token."""
        rows = []
        for length, start, kv in zip(self.lengths, self.sequences.starts.tolist(), self.kv, strict=True):
            group = self.q.shape[1] // kv.shape[1]
            for token in range(length):
                end = kv.shape[2] - length + token + 1
                seen = kv[:, :, max(0, end - window) if window else 0 : end].double()
                k, v = seen.repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,hcd->hc", self.q[start + token].double(), k) * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                rows.append(torch.einsum("hc,hcd->hd", scores.softmax(-1), v))
        return torch.stack(rows)

    def attended(self, scale: float, **options: float) -> torch.Tensor:
        """The kernel's rows; asserts that it wrote no other memory."""
        num_tokens, num_heads, head_dim = sum(self.lengths), *self.q.shape[1:]
        memory = torch.full((num_tokens + 2, num_heads + 1, head_dim + 3), GUARD, dtype=self.q.dtype)
        out = memory[1:, :num_heads, 1 : head_dim + 1]
        paged_attention(self.q, self.cache, self.sequences, out[: len(self.q)], scale=scale, **options)
        result = out[:num_tokens].clone()
        out[:num_tokens] = GUARD
        assert (memory == GUARD).all()
        return result


def empty_cache(sizes: tuple[int, int, int, int], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """[N, 2, K, b, h]: one layer of two, all NaN. sizes: N, K, b, h."""
    num_blocks, *inner, head_dim = sizes
    if layout == "NHD":
        inner.reverse()
    layer = torch.full((num_blocks, 2, 2, *inner, head_dim), torch.nan, dtype=dtype)[:, 1]
    return layer if layout == "HND" else layer.transpose(2, 3)


AWKWARD = {
    "one token each": Problem.of((3, 1), 64, [1, 1, 1, 1, 1], [1, 15, 16, 17, 63]),
    "several tokens, an empty sequence, splits": Problem.of(
        (12, 3), 80, [1, 3, 0, 8], [63, 17, 0, 257], layout="NHD"
    ),
    "seven heads to one, fp16": Problem.of(
        (28, 4), 96, [1, 2], [130, 33], block_size=32, dtype=torch.float16
    ),
    "64 rows": Problem.of((64, 8), 128, [8], [63], layout="NHD", dtype=torch.float16),
    "two tiles of rows": Problem.of((16, 1), 64, [8, 3], [70, 16], block_size=32),
    "wide heads": Problem.of((2, 1), 256, [2, 1], [31, 1], block_size=32, layout="NHD"),
}


@pytest.mark.parametrize("problem", AWKWARD.values(), ids=AWKWARD.keys())
def test_equals_dense_attention_and_touches_nothing_else(problem: Problem) -> None:
    tolerance = 2e-3 if problem.q.dtype == torch.float16 else 1e-5

    attended = problem.attended(0.1)

    torch.testing.assert_close(attended.double(), problem.expected(0.1), rtol=tolerance, atol=tolerance)


def test_a_second_call_gives_the_same() -> None:
    problem = AWKWARD["one token each"]

    assert torch.equal(problem.attended(0.1), problem.attended(0.1))


@pytest.mark.parametrize("window", [4, 16, 300])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_window_and_soft_cap(window: int, soft_cap: float) -> None:
    # Of 259 keys the last 4 begin in the last slot of a block.
    problem = Problem.of((4, 2), 16, [1, 8, 3], [259, 40, 3])

    attended = problem.attended(1.0, window=window, soft_cap=soft_cap)

    expected = problem.expected(1.0, window, soft_cap)
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_reference_equals_dense_attention_too() -> None:
    problem = Problem.of((12, 3), 80, [1, 3, 0, 8], [37, 17, 0, 20], layout="NHD")
    out = torch.empty(12, 12, 80)

    paged_attention_reference(
        problem.q[:12], problem.cache, problem.sequences, out, scale=0.3, window=5, soft_cap=2.0
    )

    torch.testing.assert_close(out.double(), problem.expected(0.3, 5, 2.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "counts"),
    [(4, [4, 4, 4, 4, 4, 4, 4, 4]), (6, [5, 6, 6, 6, 6, 6, 6, 6]), (16, [5, 6, 7, 8, 9, 10, 11, 12])],
)
def test_a_window_counts_the_keys_that_a_query_sees(window: int, counts: list[int]) -> None:
    # Equal scores and one-hot values: a row is 1 / count at each key seen, and 0 elsewhere.
    problem = Problem.of((2, 1), 16, [8], [12])
    problem.q.zero_()
    problem.cache[problem.sequences.block_tables[0, 0], 1, 0, :12] = torch.eye(12, 16)

    attended = problem.attended(1.0, window=window)

    for row, count in enumerate(counts):
        expected = torch.zeros(16)
        expected[row + 5 - count : row + 5] = 1 / count
        torch.testing.assert_close(attended[row], expected.expand(2, 16))


@pytest.mark.parametrize("heads", [(8, 2), (28, 4), (12, 3), (32, 8), (64, 8), (8, 1), (8, 8)])
def test_query_heads_take_the_kv_head_of_their_group(heads: tuple[int, int]) -> None:
    problem = Problem.of(heads, 16, [2], [3])
    num_heads, num_kv_heads = heads
    problem.cache[problem.sequences.block_tables[0, 0], 1, :, :3] = torch.arange(1.0, num_kv_heads + 1)[
        :, None, None
    ]

    attended = problem.attended(1.0)

    expected = torch.arange(num_heads) // (num_heads // num_kv_heads) + 1
    torch.testing.assert_close(attended, expected.float()[None, :, None].expand(2, num_heads, 16))


@pytest.mark.parametrize("config", KERNEL.configs, ids=str)
def test_every_configuration_computes_the_same(config: Config) -> None:
    problem = Problem.of((3, 1), 20, [3], [257])
    out = torch.empty(3, 3, 20)

    launches = paged_attention_launches(problem.q[:3], problem.cache, problem.sequences, out, scale=0.2)

    assert [launch.kernel for launch in launches] == [KERNEL, REDUCE_KERNEL]
    launches[0].run(config)
    for reducing in REDUCE_KERNEL.configs:
        launches[1].run(reducing)
        torch.testing.assert_close(out.double(), problem.expected(0.2), rtol=1e-5, atol=1e-5)
        out.fill_(GUARD)


def test_a_context_of_more_splits_than_one_tile_of_them_is_whole() -> None:
    # 20 splits of 128 tokens; the reducing kernel takes 16 at a time.
    problem = Problem.of((1, 1), 16, [2], [20 * 128], block_size=32)

    attended = problem.attended(1.0)

    torch.testing.assert_close(attended.double(), problem.expected(1.0), rtol=1e-5, atol=1e-5)


def test_nan_reaches_those_who_see_it_and_nobody_else() -> None:
    problem = Problem.of((2, 1), 16, [1, 1], [300, 300])
    problem.cache[problem.sequences.block_tables[0, 9], 0, 0, 3] = torch.nan

    attended = problem.attended(1.0)

    assert attended[0].isnan().all()
    torch.testing.assert_close(attended[1].double(), problem.expected(1.0)[1], rtol=1e-5, atol=1e-5)


def test_keys_and_values_beyond_fp16_become_its_largest() -> None:
    problem = Problem.of((2, 1), 16, [1], [2])
    problem.q = torch.ones_like(problem.q, dtype=torch.float16)
    block = problem.cache[problem.sequences.block_tables[0, 0]]
    block[0, 0, 0], block[0, 0, 1] = 1e6, -1e6
    block[1, 0, 0], block[1, 0, 1] = 1e6, 1.0

    attended = problem.attended(1.0)

    assert (attended == 65504.0).all()


def test_block_ids_reach_beyond_2_31_elements(tmp_path: Path) -> None:
    # 16 tokens x 8 heads x 128 = 16,384 elements of keys, as many of values. The file is sparse: only the
    # pages that are touched exist.
    num_blocks, numbers = 65_700, (2, 8, 16, 128)
    size = num_blocks * int(np.prod(numbers))
    memory = torch.from_file(str(tmp_path / "cache"), shared=True, size=size, dtype=torch.float16)
    cache = memory.view(num_blocks, *numbers)
    dense = torch.randn(2, 8, 20, 128, generator=torch.Generator().manual_seed(0)).half()
    table = np.array([[num_blocks - 1, 65_537]], np.int32)
    cache[num_blocks - 1], cache[65_537, :, :, :4] = dense[:, :, :16], dense[:, :, 16:]
    sequences = Sequences.of_arrays(*(np.array([n], np.int32) for n in (0, 1, 20)), table, CPU)
    problem = Problem([1], [dense], torch.randn(1, 8, 128).half(), cache, sequences)

    attended = problem.attended(0.1)

    torch.testing.assert_close(attended.double(), problem.expected(0.1), rtol=2e-3, atol=2e-3)


def test_what_the_kernel_cannot_read_is_refused() -> None:
    problem = Problem.of((4, 2), 16, [1], [5])
    q, cache, sequences = problem.q[:1], problem.cache, problem.sequences
    many = Problem.of((4, 2), 16, [9], [9])
    cases = [
        ((many.q[:9], many.cache, many.sequences, torch.empty(9, 4, 16)), "prefill_attention"),
        ((q, cache, sequences, torch.empty(1, 4, 20)), "one shape"),
        ((q, cache[..., :8], sequences, torch.empty(1, 4, 16)), "head_dim"),
        ((q[:, :3], cache, sequences, torch.empty(1, 3, 16)), "evenly"),
        ((q, cache, sequences, torch.empty(1, 16, 4).transpose(1, 2)), "contiguous"),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            paged_attention(*arguments, scale=1.0)
