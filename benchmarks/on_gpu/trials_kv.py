"""Keys and values on their way: what `benchmarks.gpu` checks of rope_store_kv and block_copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.on_gpu.trial import Trial, TrialCase, normal, poison
from engine.kernels.block_copy import (
    gather_blocks_launch,
    gather_blocks_reference,
    scatter_blocks_launch,
    scatter_blocks_reference,
)
from engine.kernels.choices import Choices
from engine.kernels.rope_store_kv import rope_store_kv_launch, rope_store_kv_reference
from engine.kv_cache import CacheShape

_EPS = 1e-5
_HALF, _BFLOAT, _FLOAT = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """heads: for queries, for keys, and their head_dim.  kv_dtype: the cache's.

    dtype: of q, k and v, of the rows and the stage beside the cache, or of the wire.
    far: blocks of the cache, of which the highest are used; 0: as few as are needed.
    """

    heads: tuple[int, int, int]
    num_tokens: int
    block_size: int = 16
    layout: str = "HND"
    dtype: torch.dtype = _BFLOAT
    kv_dtype: torch.dtype = _BFLOAT
    has_norm: bool = False
    far: int = 0

    def __str__(self) -> str:
        types = "{} to {}".format(*(str(d).removeprefix("torch.") for d in (self.dtype, self.kv_dtype)))
        words = [f"{self.num_tokens} tokens", "heads {}/{} x {}".format(*self.heads)]
        words += [f"blocks of {self.block_size}", self.layout, types]
        return ", ".join(
            [*words, *(["norms"] if self.has_norm else []), *(["of many blocks"] if self.far else [])]
        )

    @property
    def near(self) -> int:
        """Blocks of the cache, from its end on, that anything is written to."""
        return 2 * -(-self.num_tokens // self.block_size) + 1

    @property
    def num_blocks(self) -> int:
        """Of the cache."""
        return self.far or self.near

    def cache(
        self, num_blocks: int, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """[N, L, 2, K, b, h], strided as the layout demands, all zeros."""
        shape = CacheShape(
            num_blocks=num_blocks,
            num_layers=num_layers,
            num_kv_heads=self.heads[1],
            block_size=self.block_size,
            head_dim=self.heads[2],
            dtype=dtype,
            layout=self.layout,
        )
        memory = torch.zeros(shape.physical, dtype=dtype, device=device)
        return memory.transpose(3, 4) if self.layout == "NHD" else memory


_COMMON = Problem(heads=(32, 8, 128), num_tokens=63)
_PROBLEMS = (
    Problem(heads=(3, 1, 64), num_tokens=1, dtype=_HALF, kv_dtype=_HALF),
    Problem(heads=(3, 1, 96), num_tokens=15, block_size=32, layout="NHD"),
    Problem(heads=(12, 3, 80), num_tokens=16, layout="NHD", dtype=_HALF, kv_dtype=_BFLOAT),
    Problem(heads=(12, 3, 256), num_tokens=17, block_size=32, has_norm=True),
    Problem(heads=(28, 4, 128), num_tokens=63, kv_dtype=_HALF),
    Problem(heads=(64, 8, 128), num_tokens=257, layout="NHD", has_norm=True, kv_dtype=_FLOAT),
    _COMMON,
    # 2 layers x 2 x 8 x 16 x 128 elements a block: the highest ids begin beyond 2^32 of them.
    replace(_COMMON, far=70_000),
)
_TINY_PROBLEMS = (
    Problem(heads=(3, 1, 20), num_tokens=3, dtype=_FLOAT, kv_dtype=_HALF, has_norm=True),
    Problem(heads=(2, 1, 16), num_tokens=5, layout="NHD", dtype=_HALF, kv_dtype=_HALF, far=20),
)


def kv_cases(*, is_tiny: bool) -> Iterator[TrialCase]:
    """Every problem: stored in the cache alone, in all places, gathered and scattered."""
    for problem in _TINY_PROBLEMS if is_tiny else _PROBLEMS:
        for has_more in (False, True):
            name = f"{problem}{', rows and a stage' if has_more else ''}"
            yield TrialCase(kernel="rope_store_kv", name=name, make=partial(_store_trial, problem, has_more))
        for direction in ("gather", "scatter"):
            yield TrialCase(
                kernel="block_copy",
                name=f"{direction}, {problem}",
                make=partial(_copy_trial, problem, direction),
            )


class _Stored:
    """Tensors of a call of rope_store_kv; its reference has a cache of the near blocks alone."""

    def __init__(self, problem: Problem, has_more: bool, device: torch.device) -> None:
        num_heads, num_kv_heads, head_dim = problem.heads
        count, self.num_heads, num_rotated = problem.num_tokens, num_heads, num_heads + num_kv_heads
        shape = (count, num_rotated + num_kv_heads, head_dim)
        self.qkv_TNh = normal(*shape, dtype=problem.dtype, device=device)
        angles = normal(count, 1, head_dim // 2, dtype=_FLOAT, device=device)
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=2)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=2)
        self.norm = normal(num_rotated, head_dim, dtype=_FLOAT, device=device) if problem.has_norm else None
        # The second layer of two. Every other one of the highest slots, backwards.
        self.cache_N2Kbh = problem.cache(problem.num_blocks, 2, problem.kv_dtype, device)[:, 1]
        self.slots_T = problem.num_blocks * problem.block_size - 1 - 2 * torch.arange(count, device=device)
        self.first_near = problem.num_blocks - problem.near
        self.near_slots_T = self.slots_T - self.first_near * problem.block_size
        self.rows = self.stage = self.stage_slots_T = None
        if has_more:
            self.rows = torch.zeros(count, 2, num_kv_heads, head_dim, dtype=problem.kv_dtype, device=device)
            self.stage = problem.cache(problem.near, 1, problem.kv_dtype, device)[:, 0]
            self.stage_slots_T = torch.arange(count, device=device)
            self.stage_slots_T[: count // 2] = -1
        self.output_TNh = torch.empty_like(self.qkv_TNh)

    def run(self, choices: Choices) -> None:
        """Into fresh tensors."""
        self.output_TNh.copy_(self.qkv_TNh)
        for tensor in self._written():
            tensor.zero_()
        choices.run(
            rope_store_kv_launch(
                self.output_TNh,
                self.cos,
                self.sin,
                self.cache_N2Kbh,
                self.slots_T,
                num_heads=self.num_heads,
                head_norm_Nh=self.norm,
                eps=_EPS,
                rows_T2Kh=self.rows,
                stage_N2Kbh=self.stage,
                stage_slots_T=self.stage_slots_T,
            )
        )

    def outputs(self) -> list[torch.Tensor]:
        """Of the cache the near blocks."""
        cache_N2Kbh, *others = self._written()
        return [self.output_TNh, cache_N2Kbh[self.first_near :], *others]

    def expected(self) -> list[torch.Tensor]:
        """By the reference."""
        qkv_TNh, (_, *written) = self.qkv_TNh.clone(), [torch.zeros_like(each) for each in self.outputs()]
        rope_store_kv_reference(
            qkv_TNh,
            self.cos,
            self.sin,
            written[0],
            self.near_slots_T,
            num_heads=self.num_heads,
            head_norm_Nh=self.norm,
            eps=_EPS,
            rows_T2Kh=written[1] if self.rows is not None else None,
            stage_N2Kbh=written[2] if self.stage is not None else None,
            stage_slots_T=self.stage_slots_T,
        )
        return [qkv_TNh, *written]

    def is_rest_intact(self) -> bool:
        """Whether the cache's other blocks are still zero."""
        return not bool(self.cache_N2Kbh[: self.first_near].any())

    def _written(self) -> list[torch.Tensor]:
        return [each for each in (self.cache_N2Kbh, self.rows, self.stage) if each is not None]


def _store_trial(problem: Problem, has_more: bool, device: torch.device) -> Trial:
    stored = _Stored(problem, has_more, device)
    return Trial(
        run=stored.run,
        outputs=stored.outputs,
        expected=stored.expected,
        guards=[stored.is_rest_intact],
        coarsest=problem.dtype,
    )


def _copy_trial(problem: Problem, direction: str, device: torch.device) -> Trial:
    """block_copy moves bits and sums them up: everything is equal, wherever that is."""
    cache = problem.cache(problem.num_blocks, 2, problem.kv_dtype, device)
    first_near = problem.num_blocks - problem.near
    near_ids_n = problem.near - 1 - 2 * torch.arange(problem.near // 2, device=device)
    block_ids_n = near_ids_n + first_near
    wire = normal(len(block_ids_n), *cache.shape[1:], dtype=problem.dtype, device=device)
    stored = wire.to(problem.kv_dtype)
    checksums_n = torch.zeros(len(block_ids_n), dtype=torch.int64, device=device)

    def run(choices: Choices) -> None:
        checksums_n.zero_()
        cache.zero_()
        if direction == "gather":
            cache[block_ids_n] = stored
            poison([wire])
            choices.run(gather_blocks_launch(cache, block_ids_n, wire, checksums_n))
        else:
            choices.run(scatter_blocks_launch(wire, block_ids_n, cache, checksums_n))

    def expected() -> Sequence[torch.Tensor]:
        near = torch.zeros_like(cache[first_near:])
        if direction == "scatter":
            return [near, scatter_blocks_reference(wire, near_ids_n, near)]
        near[near_ids_n] = stored
        expected_wire = torch.empty_like(wire)
        return [expected_wire, gather_blocks_reference(near, near_ids_n, expected_wire)]

    return Trial(
        run=run,
        outputs=lambda: [wire if direction == "gather" else cache[first_near:], checksums_n],
        expected=expected,
        guards=[lambda: not bool(cache[:first_near].any())],
        is_exact=True,
    )
