"""Runs one step of the model and samples its rows; loads the engine of a worker.

Synchronous, and used on the engine thread only. It knows arrays in and arrays out:
neither requests nor the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.models import ModelDir
from engine.batch import ForwardBatch, SamplingArrays, StepOutput
from engine.config import EngineConfig, ModelConfig
from engine.host_memory import keep_freed_memory
from engine.kv_cache import CacheShape, KVCache, num_blocks_in
from engine.model.weights import Checkpoint, load_decoder
from engine.sampler import sample

if TYPE_CHECKING:
    from engine.model.decoder import Decoder


class ModelRunner:
    """A decoder, its cache and the sampler, as one function from batch to output."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model = model
        self.cache = cache

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> StepOutput:
        """Stores the KV of the batch's tokens and samples its logits_rows."""
        sampled = sample(self._logits(batch), batch.sampling)
        return StepOutput(
            step_id=batch.step_id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finite=sampled.finite,
        )

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """[S, V] fp32 logits of the batch's logits_rows; stores its KV like run()."""
        return self._logits(batch)

    def warm_up(self) -> None:
        """One forward pass of a full block, so that no request pays for lazy initialisation.

        Call it before the cache holds anything: it writes to block 0.
        """
        self.run(_dummy_batch(min(self.cache.shape.block_size, self.model.config.max_model_len)))

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        inputs = self.model.prepare(batch, self.cache.shape.block_size)
        return self.model.forward(inputs, self.cache)


def load_engine(config: EngineConfig, model_dir: ModelDir | None = None) -> ModelRunner:
    """Loads weights and allocates the cache. Call it on the thread that will run the steps.

    model_dir: the opened folder of config.model, if the caller has it already.
    Raises ModelError for the checkpoint, ConfigError for a cache that does not fit.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.device == "cpu":
        keep_freed_memory()
    model_dir = model_dir or ModelDir.open(config.model)
    model_config = ModelConfig.from_hf(model_dir.config, model_dir.generation_config)
    checkpoint = Checkpoint(model_dir.weights_files, device=config.device, dtype=torch_dtype(config.dtype))
    model = load_decoder(model_config, checkpoint)
    return ModelRunner(model, allocate_cache(config, model_config, model.dtype))


def allocate_cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KVCache:
    """The cache of an engine: as many blocks as kv_cache_bytes holds, in kv_dtype (auto: dtype)."""
    shape = CacheShape(
        num_blocks=1,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.head_dim,
        dtype=torch_dtype(config.kv_dtype) or dtype,
        layout=config.layout,
    )
    return KVCache(
        shape.with_blocks(num_blocks_in(config.kv_cache_bytes, shape.bytes_per_block)), config.device
    )


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of a name in engine.config.DTYPES; None for "auto"."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(name)


def _dummy_batch(num_tokens: int) -> ForwardBatch:
    """One greedy sequence of token 0 in block 0."""
    return ForwardBatch(
        step_id=0,
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens),
        slot_mapping=np.arange(num_tokens),
        cu_seqlens_q=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        logits_rows=np.array([num_tokens - 1]),
        sampling=SamplingArrays(
            temperature=np.zeros(1, np.float32),
            top_k=np.zeros(1, np.int64),
            top_p=np.ones(1, np.float32),
            min_p=np.zeros(1, np.float32),
            seed=np.zeros(1, np.uint64),
            position=np.array([num_tokens]),
            sample_index=np.zeros(1, np.int64),
            want_logprobs=np.zeros(1, np.bool_),
        ),
    )
