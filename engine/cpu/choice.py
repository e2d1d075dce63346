"""Whether a model's layers can be computed by the kernels for CPUs, and the pass that does so."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from engine.model.plain_pass import PlainPass

if TYPE_CHECKING:
    from baton.model_config import ModelConfig

DTYPES = (torch.bfloat16, torch.float32)


def why_not(dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """What keeps the kernels from these types of weights and cache; empty if nothing does."""
    if dtype not in DTYPES or cache_dtype != dtype:
        return f"weights are {dtype} and the cache is {cache_dtype}; both have to be bfloat16, or float32"
    if find_spec("numba") is None:
        return "package numba is missing"
    # numba takes a quarter of a second to import.
    from engine.cpu.team import has_team  # noqa: PLC0415

    return "" if has_team() else "torch runs on another OpenMP runtime than GNU's here"


def kernel_pass(config: ModelConfig, dtype: torch.dtype) -> PlainPass:
    """The pass, its kernels compiled and timed, or found so on disk. why_not() has to be empty.

    Call it on the thread that will run the steps, once torch has its number of threads.
    """
    from engine.cpu import layer  # noqa: PLC0415
    from engine.cpu.attention import CpuAttention  # noqa: PLC0415
    from engine.cpu.attention_kernels import decode_kernel  # noqa: PLC0415
    from engine.cpu.chunk_choice import ChunkChoice  # noqa: PLC0415
    from engine.cpu.layer_kernels import (  # noqa: PLC0415
        gate_kernel,
        residual_kernel,
        rotation_kernel,
        store_kernel,
    )

    size, head_dim = dtype.itemsize, config.head_dim
    # What a step of the model uses, so that no request waits for a compiler.
    residual_kernel(size)
    rotation_kernel(size, head_dim)
    gate_kernel(size, is_silu=config.activation == "silu")
    store_kernel(size)
    decode_kernel(size, head_dim, config.num_heads // config.num_kv_heads)
    return PlainPass(config, layer, CpuAttention(ChunkChoice.of(config, dtype)))
