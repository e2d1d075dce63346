"""What the machine can do at most, by torch: products of bfloat16 matrices, and reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SIZE = 2048
RUNS = 5
READ_BYTES = 256 << 20


def gemm_rate() -> float:
    """FLOP/s of a product of square matrices in bfloat16; the best of some."""
    a, b = (torch.ones(SIZE, SIZE, dtype=torch.bfloat16) for _ in range(2))
    return max(2 * SIZE**3 / _seconds(lambda: a @ b) for _ in range(RUNS))


def read_rate() -> float:
    """Bytes/s of a sum over more memory than fits any cache of a core; the best of some."""
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return max(READ_BYTES / _seconds(data.sum) for _ in range(RUNS))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
