"""Greedy steps of one sequence, by hand: no scheduler and no requests.

Owns the batches. Blocks are the caller's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.batch import ForwardBatch, SamplingArrays
from engine.runner import ModelRunner
from engine.step_runner import OnLayers
from engine.thread import EngineThread

_step_ids = itertools.count(1)


def random_prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Tokens, the same in every process."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


class Greedy:
    """A sequence in blocks of a cache, computed on an engine's thread."""

    def __init__(self, engine: EngineThread, block_ids: Sequence[int]) -> None:
        self._engine = engine
        assert isinstance(engine.runner, ModelRunner)
        self._cache = engine.runner.cache
        self._block_ids = np.array(block_ids, np.int64)
        self._block_size = self._cache.shape.block_size

    async def compute(
        self,
        prompt: Sequence[int],
        chunk_tokens: int,
        *,
        on_chunk: Callable[[int], None] = lambda _: None,
        on_layers: OnLayers | None = None,
    ) -> int:
        """Computes a prompt in chunks and returns the token behind it.

        on_chunk: called with the tokens computed so far, after each chunk but the last.
        on_layers: of the last chunk, as of StepRunner.execute().
        """
        for start in range(0, len(prompt), chunk_tokens):
            end = min(start + chunk_tokens, len(prompt))
            batch = self._batch(prompt[start:end], start, is_last=end == len(prompt))
            if end == len(prompt):
                break
            await self._engine.execute(batch)
            on_chunk(end)
        output = await self._engine.execute(batch, on_layers)
        return int(output.token_ids[0])

    async def decode(self, first: int, position: int, num_tokens: int) -> list[int]:
        """So many tokens, the first one among them, whose place in the sequence is `position`."""
        tokens = [first]
        while len(tokens) < num_tokens:
            batch = self._batch(tokens[-1:], position + len(tokens) - 1, is_last=True)
            output = await self._engine.execute(batch)
            tokens.append(int(output.token_ids[0]))
        return tokens

    async def kv(self, num_tokens: int) -> torch.Tensor:
        """[T, L, 2, K, h]: what the cache has of its first tokens, in host memory."""
        cache, positions = self._cache, torch.arange(num_tokens)
        blocks = torch.from_numpy(self._block_ids)[positions // self._block_size]

        def read() -> torch.Tensor:
            where = (blocks.to(cache.device), (positions % self._block_size).to(cache.device))
            # Two indices apart put what they choose first.
            return cache.logical[where[0], :, :, :, where[1]].cpu()

        return await self._engine.call(read)

    async def poison(self) -> None:
        """Fills the blocks with NaN, so that nobody who has them next finds what was there."""

        def fill() -> None:
            self._cache.data[torch.from_numpy(self._block_ids).to(self._cache.device)] = torch.nan
            self._cache.synchronize()

        await self._engine.call(fill)

    def _batch(self, token_ids: Sequence[int], start: int, *, is_last: bool) -> ForwardBatch:
        end = start + len(token_ids)
        positions = np.arange(start, end)
        blocks = self._block_ids[positions // self._block_size]
        return ForwardBatch(
            step_id=next(_step_ids),
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            cu_seqlens_q=np.array([0, len(token_ids)], np.int32),
            seq_lens=np.array([end], np.int32),
            block_tables=self._block_ids[None, : -(-end // self._block_size)].astype(np.int32),
            logits_rows=np.array([len(token_ids) - 1] if is_last else [], np.int64),
            sampling=_greedy(end, num_rows=int(is_last)),
        )


def _greedy(position: int, num_rows: int) -> SamplingArrays:
    return SamplingArrays(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int64),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.zeros(num_rows, np.uint64),
        position=np.full(num_rows, position),
        sample_index=np.zeros(num_rows, np.int64),
        want_logprobs=np.zeros(num_rows, np.bool_),
    )
