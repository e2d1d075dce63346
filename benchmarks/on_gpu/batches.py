"""Batches of uniform steps, for a model that nothing but `benchmarks.gpu` asks."""

from __future__ import annotations

import numpy as np

from engine.batch import ForwardBatch, Int64Array, SamplingArrays
from engine.kernels.model_launches import Step
from engine.runner import ModelRunner


def uniform_batch(
    step: Step,
    runner: ModelRunner,
    token_ids: Int64Array | None = None,
    *,
    is_in_order: bool = False,
) -> ForwardBatch:
    """The last tokens of sequences of one length, greedy; random tokens in random blocks unless told."""
    size, rng = runner.cache.shape.block_size, np.random.default_rng(0)
    tables = step.block_tables(size)
    if not is_in_order:
        tables = rng.permutation(tables.reshape(-1)).reshape(tables.shape)
    if token_ids is None:
        token_ids = rng.integers(0, runner.model.config.vocab_size, step.num_tokens)
    count, new = step.num_sequences, np.arange(step.context - step.new_tokens, step.context)
    slots = tables[:, new // size].astype(np.int64) * size + new % size
    ends = np.arange(1, count + 1) * step.new_tokens
    return ForwardBatch(
        step_id=0,
        token_ids=token_ids,
        positions=np.tile(new, count),
        slot_mapping=slots.reshape(-1),
        cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=np.full(count, step.context, np.int32),
        block_tables=tables,
        logits_rows=ends - 1,
        sampling=_greedy(count, step.context),
    )


def _greedy(count: int, position: int) -> SamplingArrays:
    zeros = np.zeros(count, np.int64)
    return SamplingArrays(
        temperature=zeros.astype(np.float32),
        top_k=zeros,
        top_p=np.ones(count, np.float32),
        min_p=zeros.astype(np.float32),
        seed=zeros.astype(np.uint64),
        position=zeros + position,
        sample_index=zeros,
        want_logprobs=zeros.astype(np.bool_),
    )
