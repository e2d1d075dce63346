"""One model in several precisions, fed the same tokens: what it computes, step by step.

A prefill engine computes prompts in chunks, its cache is converted as a transfer converts it, and a decode
engine goes on. The tokens of the first run are given to all others, so that every position can be compared.

Shape suffixes: P prompts, S steps (the first token's, then one per decode step), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.sampling import SamplingParams
from engine.batch_builder import Chunk, build_batch
from engine.config import EngineConfig
from engine.load import load_engine
from engine.request import Request
from engine.runner import ModelRunner
from kvtransfer.conversion import DTYPES, Conversion

BLOCK_SIZE = 16
# Of a prompt, so that later chunks read what the cache has made of the earlier ones.
CHUNK_TOKENS = 32
# Room for 20 prompts of 100 tokens of SmolLM2-135M in float32, and for any tiny model.
_CACHE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Element types: of weights and computation, and of the two caches."""

    dtype: str
    prefill_kv: str
    decode_kv: str

    def __str__(self) -> str:
        return f"{self.dtype}: {self.prefill_kv} -> {self.decode_kv}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """logits: [S, P, V] fp32. num_saturated: values that the decode cache's type could not hold."""

    logits: torch.Tensor
    num_saturated: int

    @property
    def token_ids(self) -> torch.Tensor:
        """[S, P], the greedy choice at every position."""
        return self.logits.argmax(dim=-1)


def compute(
    model: str, precision: Precision, prompts: Sequence[list[int]], forced_SP: torch.Tensor | int
) -> Computed:
    """The logits of the prompts' last tokens and of the steps behind them.

    forced_SP: [S, P] the tokens to go on with, whatever is computed; a number S goes on with its own.
    """
    num_steps = forced_SP if isinstance(forced_SP, int) else len(forced_SP)
    prefill, decode = (
        _engine(model, precision.dtype, kv_dtype) for kv_dtype in (precision.prefill_kv, precision.decode_kv)
    )
    requests = _requests(prompts, num_steps)
    steps = [torch.stack([_prefill(prefill, request) for request in requests])]
    num_saturated = _transfer(prefill, decode, sum(len(request.block_ids) for request in requests))
    for step in range(num_steps - 1):
        tokens_P = steps[-1].argmax(dim=-1) if isinstance(forced_SP, int) else forced_SP[step]
        for request, token_id in zip(requests, tokens_P.tolist(), strict=True):
            request.token_ids.append(token_id)
        steps.append(_step(decode, requests, [1] * len(requests)))
    return Computed(logits=torch.stack(steps), num_saturated=num_saturated)


def _engine(model: str, dtype: str, kv_dtype: str) -> ModelRunner:
    config = EngineConfig(
        model=model, dtype=dtype, kv_dtype=kv_dtype, block_size=BLOCK_SIZE, kv_cache_bytes=_CACHE_BYTES
    )
    return load_engine(config)


def _num_blocks(prompt: list[int], num_steps: int) -> int:
    return -(-(len(prompt) + num_steps) // BLOCK_SIZE)


def _requests(prompts: Sequence[list[int]], num_steps: int) -> list[Request]:
    requests = []
    next_block = 0
    for number, prompt in enumerate(prompts):
        blocks = range(next_block, next_block + _num_blocks(prompt, num_steps))
        next_block = blocks.stop
        requests.append(
            Request(
                attempt_id=number.to_bytes(16, "big"),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                params=SamplingParams(temperature=0, max_tokens=num_steps),
                block_ids=list(blocks),
            )
        )
    return requests


def _prefill(runner: ModelRunner, request: Request) -> torch.Tensor:
    while request.num_pending_tokens:
        logits = _step(runner, [request], [min(CHUNK_TOKENS, request.num_pending_tokens)])
    return logits[-1]


def _step(runner: ModelRunner, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
    """[P, V] of the requests that have nothing left to compute behind this step."""
    chunks = [Chunk.of(request, count) for request, count in zip(requests, counts, strict=True)]
    logits = runner.logits(build_batch(1, chunks, BLOCK_SIZE))
    for request, count in zip(requests, counts, strict=True):
        request.num_computed_tokens += count
    return logits


def _transfer(prefill: ModelRunner, decode: ModelRunner, num_blocks: int) -> int:
    """Converts the leading blocks as they lie; returns how many values were saturated."""
    name = next(name for name, dtype in DTYPES.items() if dtype == prefill.cache.shape.dtype)
    conversion = Conversion(decode.cache.shape.dtype)
    num_saturated = 0
    for block in range(num_blocks):
        payload = prefill.cache.data[block].reshape(-1).view(torch.uint8).numpy()
        bits, excess = conversion.convert(payload.data, name)
        target = decode.cache.data[block].reshape(-1).view(torch.uint8)
        target.copy_(torch.from_numpy(bits.view(np.uint8)))
        num_saturated += 0 if excess is None else int(excess.sum())
    return num_saturated
