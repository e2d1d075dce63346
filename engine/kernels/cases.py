"""Calls of known models on no device: what the audit compiles.

Sizes are those of the models' config.json. Llama 3.1 is the common case. Qwen 2.5 has biases and seven query
heads to a key head. Gemma 3 has heads of 256 with norms, a window, norms behind attention and MLP, and
another activation. Heads of 80 (Danube) and 96 (Phi-3) are no powers of two; Phi-3 has Llama's layers here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.model_config import ModelConfig
from engine.kernels.kernel import Launch
from engine.kernels.model_launches import Step, model_launches
from engine.kv_cache import CacheShape, KVCache

# Enough for offsets beyond 2^31 elements; nothing is allocated.
NUM_BLOCKS = 100_000
BLOCK_SIZES = (16, 64)
STEPS = (
    Step(num_sequences=2, new_tokens=1024, context=2048),
    # Short prompts: small tiles.
    Step(num_sequences=8, new_tokens=16, context=16),
    # Last chunks of a few tokens, of short contexts and of a long one.
    *(Step(num_sequences=1, new_tokens=tokens, context=16) for tokens in (2, 4, 8)),
    Step(num_sequences=1, new_tokens=8, context=4096),
    Step(num_sequences=32, new_tokens=1, context=1024),
    # One long sequence: its context is split, and a second kernel reduces.
    Step(num_sequences=1, new_tokens=1, context=8192),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's name and sizes, and the dtype of its weights."""

    name: str
    config: ModelConfig
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a cache keeps KV. kv_dtype: None: in the weights' dtype."""

    kv_dtype: torch.dtype | None = None
    layout: str = "HND"

    def __str__(self) -> str:
        kept = "" if self.kv_dtype is None else f", kept in {str(self.kv_dtype).removeprefix('torch.')}"
        return f"{self.layout}{kept}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call. storage: of the cache.  problem: what it computes, beside the kernel's name."""

    model: str
    storage: Storage
    problem: str
    launch: Launch


def _config(
    architecture: str, hidden: int, intermediate: int, heads: tuple[int, int, int], vocab: int, **rest: Any
) -> ModelConfig:
    """heads: for queries, for keys, and their head_dim."""
    settings: Mapping[str, Any] = {
        "architectures": [architecture],
        "num_hidden_layers": 32,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        **rest,
    }
    return ModelConfig.from_hf(settings)


LLAMA = Model(
    name="Llama-3.1-8B",
    config=_config("LlamaForCausalLM", 4096, 14336, (32, 8, 128), 128_256, rope_theta=500_000.0),
)
MODELS = (
    LLAMA,
    Model(name="Qwen2.5-7B", config=_config("Qwen2ForCausalLM", 3584, 18944, (28, 4, 128), 152_064)),
    Model(
        name="Gemma-3-4B",
        config=_config("Gemma3ForCausalLM", 2560, 10240, (8, 4, 256), 262_208, sliding_window=1024),
    ),
    Model(
        name="Danube-1.8B",
        config=_config("MistralForCausalLM", 2560, 6912, (32, 8, 80), 32_000),
        dtype=torch.float16,
    ),
    Model(name="Phi-3-mini", config=_config("LlamaForCausalLM", 3072, 8192, (32, 32, 96), 32_064)),
)


PLAIN = Storage()
# Half precision in either type; the compiler is given NHD as it is HND, wherever sizes are multiples of 16.
OTHER_STORAGES = (
    Storage(layout="NHD"),
    Storage(kv_dtype=torch.float16),
    Storage(kv_dtype=torch.bfloat16),
)


def cases(
    models: tuple[Model, ...] = MODELS,
    block_sizes: tuple[int, ...] = BLOCK_SIZES,
    storages: tuple[Storage, ...] = (PLAIN,),
) -> Iterator[Case]:
    """Every call of every model, block size and storage: prefill, decode and what moves KV."""
    for model, block_size, storage in itertools.product(models, block_sizes, storages):
        for launch in launches(model, block_size, storage):
            problem = f"blocks of {block_size}, {storage}"
            yield Case(model=model.name, storage=storage, problem=problem, launch=launch)


def launches(model: Model, block_size: int, storage: Storage = PLAIN) -> Iterator[Launch]:
    """A model's calls over one cache."""
    cache_NL2Kbh = _cache(model, block_size, storage)
    for step in STEPS:
        yield from model_launches(model.config, step, cache_NL2Kbh, model.dtype)


def _cache(model: Model, block_size: int, storage: Storage) -> torch.Tensor:
    shape = CacheShape(
        num_blocks=NUM_BLOCKS,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        block_size=block_size,
        head_dim=model.config.head_dim,
        dtype=storage.kv_dtype or model.dtype,
        layout=storage.layout,
    )
    return KVCache(shape, "meta").logical
