"""Tiny random checkpoints made with transformers, and batches over them."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from baton.model_config import ModelConfig
from baton.sampling import SamplingParams
from engine.batch import ForwardBatch
from engine.batch_builder import Chunk, build_batch
from engine.kv_cache import CacheShape, KVCache
from engine.model.loading import load_decoder
from engine.model.weights import Checkpoint
from engine.request import Request
from engine.runner import ModelRunner

# Nothing is a power of two, so that a swapped dimension cannot pass unnoticed.
AWKWARD = {
    "vocab_size": 101,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


# Two logits closer than this may change places between two correct ways to add numbers.
TIE = 1e-4

Reference = Callable[..., tuple[Path, LlamaForCausalLM]]
Families = Callable[[str], tuple[Path, PreTrainedModel]]


def save_reference(folder: Path, **overrides: Any) -> LlamaForCausalLM:
    """A random model with weights large enough that positions and tokens matter."""
    torch.manual_seed(1)
    config = LlamaConfig(**(AWKWARD | {"initializer_range": 0.2} | overrides))
    model = LlamaForCausalLM(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Makes norms and biases matter, which transformers starts at one and zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)


def load_runner(
    folder: Path,
    *,
    layout: str = "HND",
    block_size: int = 4,
    num_blocks: int = 120,
    dtype: torch.dtype = torch.float32,
) -> ModelRunner:
    """A runner whose cache is full of NaN: whatever leaks from an unused slot shows."""
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    model = load_decoder(config, Checkpoint(sorted(folder.glob("*.safetensors")), dtype=dtype))
    shape = CacheShape(
        num_blocks=num_blocks,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        head_dim=config.head_dim,
        dtype=dtype,
        layout=layout,
    )
    cache = KVCache(shape)
    cache.data.fill_(torch.nan)
    return ModelRunner(model, cache)


def make_request(token_ids: Sequence[int], *, number: int = 0, **fields: Any) -> Request:
    """A greedy request of these tokens; parameters of sampling go under `params`."""
    params = fields.pop("params", SamplingParams(temperature=0, max_tokens=32))
    fields.setdefault("num_prompt_tokens", len(token_ids))
    return Request(attempt_id=number.to_bytes(16, "big"), token_ids=list(token_ids), params=params, **fields)


def prompts_of(*lengths: int) -> list[list[int]]:
    """Random prompts of these lengths, the same at every call."""
    rng = random.Random(7)
    return [[rng.randrange(101) for _ in range(length)] for length in lengths]


def shuffled_blocks(num_blocks: int = 120) -> list[int]:
    """Every block of a cache, in no order."""
    return random.Random(3).sample(range(num_blocks), num_blocks)


def scattered(token_ids: list[int], free: list[int], *, block_size: int = 4, room: int = 0) -> Request:
    """A request whose blocks are taken from anywhere in the cache."""
    count = -(-(len(token_ids) + room) // block_size)
    return make_request(token_ids, block_ids=[free.pop() for _ in range(count)])


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits at every position, [T, V]."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@torch.no_grad()
def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The prompt and transformers' greedy tokens behind it, none of which was nearly another one."""
    ids = torch.tensor([prompt])
    # Without a mask of its own, generate() would take a prompt's token 0 for padding.
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0].tolist()
    best, second = reference_logits(model, tokens[:-1])[len(prompt) - 1 :].topk(2).values.unbind(dim=1)
    assert (best - second).min() > TIE, "a near tie; choose another seed for this model or its prompts"
    return tokens


def logits_of(runner: ModelRunner, chunks: Sequence[tuple[Request, int]]) -> list[torch.Tensor]:
    """Computes the chunks as one batch; returns the logits of every token, one tensor per chunk."""
    batch = build_batch(
        1, [Chunk.of(request, count) for request, count in chunks], runner.cache.shape.block_size
    )
    logits = runner.logits(with_all_logits(batch))
    for request, count in chunks:
        request.num_computed_tokens += count
    return list(logits.split([count for _, count in chunks]))


def with_all_logits(batch: ForwardBatch) -> ForwardBatch:
    return dataclasses.replace(batch, logits_rows=np.arange(batch.num_tokens))
