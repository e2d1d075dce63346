"""Runs one step of the model and samples its rows.

Synchronous, and used on the engine thread only. It knows arrays in and arrays out:
neither requests nor the event loop.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.cache import cache_dir
from engine.batch import (
    ForwardBatch,
    SamplingArrays,
    ScoredRows,
    Scores,
    StepOutput,
    TopTokens,
)
from engine.kv_staging import KvStaging
from engine.logprobs import score
from engine.model.plain_pass import PlainPass
from engine.nonfinite import LayerSearch, sequences_of
from engine.sampler import Sampled, sample
from engine.stored import Stored

if TYPE_CHECKING:
    from engine.kernels.choices import Choices
    from engine.kv_cache import KVCache
    from engine.kv_staging import StagedRows
    from engine.model.compiled import Compilation
    from engine.model.decoder import Decoder
    from engine.step_runner import OnLayers

# Of prompts whose last chunk is shorter, KV is not staged: its blocks are few, and one of them began before.
_MIN_STAGED_TOKENS = 9
# Most logits of prompt tokens at a time, in numbers: 64 MiB, whatever the batch and the vocabulary.
_MAX_SCORED_LOGITS = 1 << 24


class ModelRunner:
    """A decoder, its cache and the sampler, as one function from batch to output.

    debug_nonfinite: if logits are not finite, find out in which layer that begins.
    """

    def __init__(self, model: Decoder, cache: KVCache, *, debug_nonfinite: bool = False) -> None:
        self.model = model
        self.cache = cache
        self._debug_nonfinite = debug_nonfinite
        self._staging: KvStaging | None = None

    @property
    def kernel_choices(self) -> Choices | None:
        """What the model's kernels run with; None if it is computed without."""
        return self.model.forward_pass.choices

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, stored: OnLayers | None = None) -> StepOutput:
        """Stores the KV of the batch's tokens, samples its logits_rows and scores its scored rows.

        stored: called on this thread after each layer's store. It hears of the stage, if there is one.
        """
        num_sampled = len(batch.logits_rows)
        hidden_RD = self._forward(batch, stored)
        sampled = sample(self.model.logits(hidden_RD[:num_sampled]), batch.sampling)
        scores = None if batch.scored is None else self._score(hidden_RD[num_sampled:], batch.scored)
        if not num_sampled:
            # A sampled token is only known once the device has finished. Without one nothing has waited for
            # it, and whoever hears of this step's end reads the KV on another stream.
            self.cache.synchronize()
        return StepOutput(
            step_id=batch.step_id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finite=sampled.finite,
            blocked=sampled.blocked,
            mask_errors=sampled.mask_errors,
            top=sampled.top,
            scores=scores,
            nonfinite_at=self._nonfinite_at(batch, sampled, scores) if self._debug_nonfinite else {},
        )

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch, stored: OnLayers | None = None) -> torch.Tensor:
        """[S, V] fp32 logits of the batch's logits_rows; stores its KV like run()."""
        return self.model.logits(self._forward(batch, stored)[: len(batch.logits_rows)])

    def compile(self) -> Compilation | None:
        """Compiles the layers. None: that failed, they stay eager, and a warning says why.

        Call it before the cache holds anything: it writes to the first blocks.
        """
        # Seconds of imports, for those who want it only.
        from engine.model.compiled import CompiledLayer  # noqa: PLC0415

        compiled = CompiledLayer(cache_dir() / "compiled")
        self.model.forward_pass = PlainPass(self.model.config, compiled)
        return compiled.compile(self._compute_dummy)

    def warm_up(self) -> None:
        """One forward pass of a full block, so that no request pays for lazy initialisation.

        Kernels are compiled and loaded already, since the pass was chosen: engine/kernels/model_tuning.py.
        Call it before the cache holds anything: it writes to block 0.
        """
        self.run(_dummy_batch(min(self.cache.shape.block_size, self.model.config.max_model_len)))

    def stage(self, max_tokens: int) -> None:
        """From now on, kernels keep KV that is watched a second time, in the order in which it is sent.

        max_tokens: most tokens of a step.  Nothing runs, and the kernels that do so are loaded already.
        Raises ConfigError for a stage that does not fit.
        """
        self._staging = KvStaging(self.cache.shape, max_tokens, self.cache.device)

    def _compute_dummy(self, num_tokens: int) -> None:
        shape = self.cache.shape
        num_tokens = min(num_tokens, self.model.config.max_model_len, shape.num_blocks * shape.block_size)
        batch = _dummy_batch(num_tokens, -(-num_tokens // shape.block_size))
        # Two rows, if there are: a model of one layer computes the end of its layer for these alone.
        self.logits(dataclasses.replace(batch, logits_rows=np.unique([0, num_tokens - 1])))

    def _forward(self, batch: ForwardBatch, stored: OnLayers | None = None) -> torch.Tensor:
        staged = None if stored is None else self._begin_stage(batch)
        inputs = self.model.prepare(batch, self.cache.shape.block_size, staged)
        if stored is None:
            return self.model.forward(inputs, self.cache)
        step = None if staged is None else staged.step
        return self.model.forward(
            inputs,
            self.cache,
            stored=lambda num_layers: stored(num_layers, Stored(self.cache.written(), step)),
        )

    def _begin_stage(self, batch: ForwardBatch) -> StagedRows | None:
        # Only kernels store there: without them whoever reads it would find another step's KV.
        if self._staging is None or self.kernel_choices is None:
            return None
        return self._staging.begin(batch, _MIN_STAGED_TOKENS)

    def _score(self, hidden_PD: torch.Tensor, scored: ScoredRows) -> Scores:
        token_ids = torch.from_numpy(scored.token_ids).to(self.model.device)
        num_rows = max(1, _MAX_SCORED_LOGITS // self.model.config.vocab_size)
        slices = [slice(start, start + num_rows) for start in range(0, len(token_ids), num_rows)]
        parts = [
            score(self.model.logits(hidden_PD[s], token_ids[s]), token_ids[s], scored.num_top_logprobs)
            for s in slices
        ]
        return Scores(
            logprobs=np.concatenate([part.logprobs for part in parts]),
            finite=np.concatenate([part.finite for part in parts]),
            top=TopTokens(
                token_ids=np.concatenate([part.top.token_ids for part in parts]),
                logprobs=np.concatenate([part.top.logprobs for part in parts]),
            ),
        )

    def _nonfinite_at(self, batch: ForwardBatch, sampled: Sampled, scores: Scores | None) -> dict[int, str]:
        rows = batch.logits_rows[~sampled.finite]
        if batch.scored is not None and scores is not None:
            rows = np.concatenate([rows, batch.scored.rows[~scores.finite]])
        if not len(rows):
            return {}
        search = LayerSearch(self.model, self.cache, batch)
        return search.places(set(sequences_of(batch, rows).tolist()))


def _dummy_batch(num_tokens: int, num_blocks: int = 1) -> ForwardBatch:
    """One greedy sequence of token 0 in the first blocks."""
    return ForwardBatch(
        step_id=0,
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens),
        slot_mapping=np.arange(num_tokens),
        cu_seqlens_q=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
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
