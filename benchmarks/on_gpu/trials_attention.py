"""Both attentions on awkward batches: what `benchmarks.gpu` checks of prefill_attention and paged_attention.

Sequences' keys and values lie in blocks in no order, in one layer of a cache of two that is otherwise NaN.
One sequence is empty. Rows of the block table are longer than a sequence, and name blocks that do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.on_gpu.trial import Guarded, Trial, TrialCase, normal, poison
from engine.batch import Int32Array, Int64Array
from engine.kernels.choices import Choices
from engine.kernels.paged_attention import paged_attention, paged_attention_reference
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.sequences import Sequences
from engine.kv_cache import CacheShape
from engine.model import kv_range

OPERATORS = {"prefill_attention": prefill_attention, "paged_attention": paged_attention}
# By kernel: new tokens of each sequence, and tokens of its context.
_BATCHES = {
    "prefill_attention": ((1, 15, 16, 17, 0, 63, 257), (1, 15, 32, 20, 0, 103, 257)),
    "paged_attention": ((1, 2, 8, 1, 0, 3, 1, 8), (1, 15, 16, 17, 0, 63, 257, 4000)),
}
_TINY_BATCHES = {
    "prefill_attention": ((1, 0, 17), (3, 0, 19)),
    "paged_attention": ((1, 0, 2), (17, 0, 130)),
}
_NO_BLOCK = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """heads: for queries, for keys, and their head_dim.  kv_dtype: the cache's; None: that of q.

    num_blocks: of the cache; 0: as many as are needed, and one.  The highest ones are used.
    """

    heads: tuple[int, int, int]
    block_size: int = 16
    layout: str = "HND"
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int = 0
    soft_cap: float = 0.0
    num_blocks: int = 0

    def __str__(self) -> str:
        words = ["heads {}/{} x {}".format(*self.heads), f"blocks of {self.block_size}", self.layout]
        words.append(str(self.dtype).removeprefix("torch."))
        if self.kv_dtype:
            words.append(f"cache {str(self.kv_dtype).removeprefix('torch.')}")
        words += [f"{name} {value:g}" for name, value in self._options() if value]
        return ", ".join(words)

    def _options(self) -> tuple[tuple[str, float], ...]:
        return ("window", self.window), ("soft cap", self.soft_cap), ("of many blocks", self.num_blocks)


_HALF, _BFLOAT = torch.float16, torch.bfloat16
_COMMON = Problem(heads=(28, 4, 128))
_PROBLEMS = (
    Problem(heads=(3, 1, 64), dtype=_HALF),
    Problem(heads=(3, 1, 96), block_size=32, layout="NHD"),
    Problem(heads=(3, 1, 256), layout="NHD", dtype=_HALF),
    Problem(heads=(12, 3, 80), layout="NHD"),
    Problem(heads=(12, 3, 128), block_size=32, dtype=_HALF),
    Problem(heads=(12, 3, 256), block_size=32),
    _COMMON,
    Problem(heads=(28, 4, 96), block_size=32, layout="NHD", dtype=_HALF),
    Problem(heads=(64, 8, 64), block_size=32),
    Problem(heads=(64, 8, 80), dtype=_HALF),
    Problem(heads=(64, 8, 128), layout="NHD"),
    replace(_COMMON, window=100),
    replace(_COMMON, soft_cap=3.0),
    replace(_COMMON, window=16, soft_cap=3.0, layout="NHD", dtype=_HALF),
    replace(_COMMON, kv_dtype=torch.float32),
    replace(_COMMON, kv_dtype=_HALF),
    replace(_COMMON, kv_dtype=_BFLOAT, dtype=_HALF),
)
# 2 x 2 x 8 x 16 x 128 elements a block, of two layers: ids from 65,536 on begin beyond 2^32 of them.
_FAR = Problem(heads=(32, 8, 128), num_blocks=70_000)
_TINY_PROBLEMS = (
    Problem(heads=(3, 1, 20), dtype=_HALF),
    Problem(heads=(4, 2, 16), layout="NHD", dtype=torch.float32, window=5, soft_cap=3.0),
    Problem(heads=(2, 1, 16), dtype=torch.float32, num_blocks=64),
)


def attention_cases(*, is_tiny: bool) -> Iterator[TrialCase]:
    """Every problem for both kernels."""
    for kernel in OPERATORS:
        for problem in _TINY_PROBLEMS if is_tiny else (*_PROBLEMS, _FAR):
            batch = (_TINY_BATCHES if is_tiny else _BATCHES)[kernel]
            yield TrialCase(kernel=kernel, name=str(problem), make=partial(_trial, kernel, problem, batch))


def _trial(
    kernel: str, problem: Problem, batch: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device
) -> Trial:
    lengths, seq_lens = (np.array(numbers, np.int32) for numbers in batch)
    num_heads, _, head_dim = problem.heads
    num_tokens = int(lengths.sum())
    cache_N2Kbh, sequences = _stored(problem, lengths, seq_lens, device)
    # Queries are a part of the qkv product: their rows lie apart.
    qkv_TNh = normal(num_tokens, num_heads + 4, head_dim, dtype=problem.dtype, device=device)
    q_THh = qkv_TNh[:, :num_heads]
    out = Guarded(q_THh.shape, problem.dtype, device)
    options = {"scale": head_dim**-0.5, "soft_cap": problem.soft_cap}

    def run(choices: Choices) -> None:
        poison([out.inner])
        OPERATORS[kernel](
            q_THh, cache_N2Kbh, sequences, out.inner, window=problem.window, choices=choices, **options
        )

    def expected() -> list[torch.Tensor]:
        wide_THh = q_THh.float()
        # As the kernels read it: in the type of q first.
        wide_N2Kbh = kv_range.narrowed(cache_N2Kbh, problem.dtype)
        expected_THh = torch.empty_like(wide_THh, memory_format=torch.contiguous_format)
        paged_attention_reference(
            wide_THh, wide_N2Kbh, sequences, expected_THh, window=problem.window, **options
        )
        return [expected_THh]

    return Trial(run=run, outputs=lambda: [out.inner], expected=expected, guards=[out.is_intact])


def _stored(
    problem: Problem, lengths: Int32Array, seq_lens: Int32Array, device: torch.device
) -> tuple[torch.Tensor, Sequences]:
    """One layer's view of a cache with random keys and values, and the sequences that they belong to."""
    size, (_, num_kv_heads, head_dim) = problem.block_size, problem.heads
    num_needed = int((-(-seq_lens // size)).sum())
    shape = CacheShape(
        num_blocks=problem.num_blocks or num_needed + 1,
        num_layers=2,
        num_kv_heads=num_kv_heads,
        block_size=size,
        head_dim=head_dim,
        dtype=problem.kv_dtype or problem.dtype,
        layout=problem.layout,
    )
    memory = torch.full(shape.physical, torch.nan, dtype=shape.dtype, device=device)
    cache_N2Kbh = (memory.transpose(3, 4) if shape.layout == "NHD" else memory)[:, 1]
    tables = _tables(seq_lens, size, shape.num_blocks)
    slots_T = _slots(tables, seq_lens, size)
    kv_T2Kh = normal(len(slots_T), 2, num_kv_heads, head_dim, dtype=shape.dtype, device=device)
    at_T = torch.from_numpy(slots_T).to(device)
    cache_N2Kbh[at_T // size, :, :, at_T % size] = kv_T2Kh
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
    return cache_N2Kbh, Sequences.of_arrays(starts, lengths, seq_lens, tables, device)


def _tables(seq_lens: Int32Array, block_size: int, num_blocks: int) -> Int32Array:
    """[B, M] the highest blocks of the cache in no order."""
    counts = -(-seq_lens // block_size)
    tables = np.full((len(counts), int(counts.max()) + 1), _NO_BLOCK, np.int32)
    ids = num_blocks - 1 - np.random.default_rng(0).permutation(int(counts.sum()))
    taken = 0
    for row, count in zip(tables, counts.tolist(), strict=True):
        row[:count] = ids[taken : taken + count]
        taken += count
    return tables


def _slots(tables: Int32Array, seq_lens: Int32Array, block_size: int) -> Int64Array:
    """Where the tokens of all sequences are, one behind the other."""
    slots = []
    for row, seq_len in zip(tables.astype(np.int64), seq_lens.tolist(), strict=True):
        positions = np.arange(seq_len)
        slots.append(row[positions // block_size] * block_size + positions % block_size)
    return np.concatenate(slots)
