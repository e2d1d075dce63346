"""Which of two ways computes a prompt chunk's attention faster here: torch's operator, or blocks of products.

Neither is on every processor: where the operator does not use the instructions that make products of matrices
fast, blocks are up to three times faster; with AMX the operator is, as much. So both are timed at the first
start, for a few lengths; the table is kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from baton.cache import cache_dir
from engine.model.attention import causal_mask, fused_attention
from engine.model.blocked_attention import blocked_attention
from engine.private_folder import make_private

if TYPE_CHECKING:
    from baton.model_config import ModelConfig

# (new tokens, tokens that they see): whole prompts, and chunks of longer ones.
CASES: Final = ((32, 32), (128, 128), (512, 512), (2048, 2048), (64, 512), (128, 1024), (512, 2048))
# Elements of a mask above which blocks are taken, whose masks stay small.
MAX_MASK: Final = 1 << 24
_RUNS = 3
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """fused: whether the operator was faster, by case."""

    fused: Mapping[tuple[int, int], bool]

    def fuses(self, num_new: int, context: int, window: int) -> bool:
        """Whether the operator is to compute such a chunk: as in the nearest case, by ratios of lengths."""
        if window or num_new * context > MAX_MASK:
            # Blocks pass over what lies before a window.
            return False
        whole = num_new == context
        cases = [case for case in self.fused if (case[0] == case[1]) == whole]
        return self.fused[min(cases, key=partial(_distance, (num_new, context)))]

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> ChunkChoice:
        """For a model on this machine, with torch's number of threads; timed unless the disk has it."""
        shape = (config.num_heads, config.num_kv_heads, config.head_dim, str(dtype), torch.get_num_threads())
        machine = (torch.__version__, torch.backends.cpu.get_cpu_capability(), _processor())
        key = hashlib.sha256(repr((_FORMAT, CASES, shape, machine)).encode()).hexdigest()[:16]
        path = cache_dir() / "cpu" / f"attention-{key}.json"
        found = _read(path)
        if found is None:
            found = [is_fused_faster(config, dtype, *case) for case in CASES]
            _keep(path, found)
        return cls(dict(zip(CASES, found, strict=True)))


def is_fused_faster(config: ModelConfig, dtype: torch.dtype, num_new: int, context: int) -> bool:
    """Both ways in turns; the fastest run of each counts."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    q_HTh = torch.ones(num_new, heads, head_dim, dtype=dtype).transpose(0, 1)
    kv_2KCh = torch.ones(2, kv_heads, context, head_dim, dtype=dtype)
    mask_TC = causal_mask(num_new, context, 0, torch.device("cpu"))
    q_KGTh = q_HTh.view(kv_heads, -1, num_new, head_dim)
    ways: tuple[Callable[[], object], ...] = (
        partial(fused_attention, q_HTh, kv_2KCh, mask_TC, scale=1.0),
        partial(blocked_attention, q_KGTh, kv_2KCh[0], kv_2KCh[1], scale=1.0),
    )
    seconds = [math.inf, math.inf]
    # The first round is for what is made at first use.
    for number in range(_RUNS + 1):
        for index, way in enumerate(ways):
            began = time.perf_counter()
            way()
            if number:
                seconds[index] = min(seconds[index], time.perf_counter() - began)
    return seconds[0] < seconds[1]


def _distance(chunk: tuple[int, int], case: tuple[int, int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(chunk, case, strict=True))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")


def _read(path: Path) -> list[bool] | None:
    """None for what is not there, or is not what was kept."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, list) or len(found) != len(CASES):
        return None
    return [bool(each) for each in found]


def _keep(path: Path, found: list[bool]) -> None:
    """In one piece, as workers start side by side; what cannot be kept is timed again at the next start."""
    try:
        make_private(path.parent)
        partial_path = path.with_suffix(f".{os.getpid()}")
        partial_path.write_text(json.dumps(found), encoding="utf-8")
        partial_path.replace(path)
    except OSError:
        return
