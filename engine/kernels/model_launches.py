"""The kernels' calls of one step of a model: what is measured on a device, and what is compiled for others.

Made through the operators' own functions, so they are the calls that the engine makes. The step is uniform:
every sequence has as many new tokens and as much context. Tensors hold zeros: valid, and nobody's data.

Shape suffixes: T tokens, D hidden, H query heads, K kv heads, N all heads of q, k and v, h head_dim; of the
cache N blocks, n some of them, L layers, b block_size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from baton.model_config import ModelConfig
from engine.kernels.add_rms_norm import add_rms_norm_launch
from engine.kernels.block_copy import gather_blocks_launch, scatter_blocks_launch
from engine.kernels.embed_rms_norm_qkv import embed_rms_norm_qkv_launch
from engine.kernels.gated_activation import gated_activation_launch
from engine.kernels.kernel import Launch
from engine.kernels.paged_attention import MAX_NEW_TOKENS, paged_attention_launches
from engine.kernels.prefill_attention import prefill_attention_launch
from engine.kernels.rope_store_kv import rope_store_kv_launch
from engine.kernels.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Sequences of one step. context: tokens of each, the new ones included."""

    num_sequences: int
    new_tokens: int
    context: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_sequences * self.new_tokens

    def block_tables(self, block_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """[B, M] blocks of the cache that it needs, from 0 on."""
        per_sequence = -(-self.context // block_size)
        return np.arange(self.num_sequences * per_sequence, dtype=np.int32).reshape(-1, per_sequence)


def model_launches(
    config: ModelConfig, step: Step, cache_NL2Kbh: torch.Tensor, dtype: torch.dtype
) -> Iterator[Launch]:
    """One call of each kernel and of each of its variants, on the cache's device.

    cache: as KVCache.logical, in its own dtype, with blocks enough for the step; written to.
    dtype: the weights'. A call's tensors are made when it is asked for.
    """
    calls = _Calls(config, step, cache_NL2Kbh, dtype)
    yield calls.embed_rms_norm_qkv()
    yield calls.add_rms_norm()
    yield from calls.rope_store_kv()
    yield from calls.attention()
    yield calls.gated_activation()
    yield from calls.block_copies()


class _Calls:
    """The calls of one step."""

    def __init__(
        self, config: ModelConfig, step: Step, cache_NL2Kbh: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._step = step
        self._cache_NL2Kbh = cache_NL2Kbh
        self._dtype = dtype
        self._block_tables = step.block_tables(cache_NL2Kbh.shape[4])

    def embed_rms_norm_qkv(self) -> Launch:
        config, num_tokens = self._config, self._step.num_tokens
        num_outputs = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return embed_rms_norm_qkv_launch(
            self._zeros(num_tokens, dtype=torch.int64),
            self._zeros(config.vocab_size, config.hidden_size),
            self._fp32_zeros(config.hidden_size),
            config.rms_norm_eps,
            self._zeros(num_outputs, config.hidden_size),
            self._zeros(num_outputs) if config.attention_bias else None,
            self._fp32_zeros(num_tokens, config.hidden_size),
            self._zeros(num_tokens, num_outputs),
            embedding_scale=config.embedding_scale,
        )

    def add_rms_norm(self) -> Launch:
        width = self._config.hidden_size
        rows = (self._step.num_tokens, width)
        return add_rms_norm_launch(
            self._fp32_zeros(*rows),
            self._zeros(*rows),
            self._fp32_zeros(width),
            self._config.rms_norm_eps,
            self._zeros(*rows),
            delta_weight_D=self._fp32_zeros(width) if self._config.post_norms else None,
        )

    def rope_store_kv(self) -> Iterator[Launch]:
        """Into the cache; and into rows, a stage, or both as well."""
        config, num_tokens = self._config, self._step.num_tokens
        num_rotated = config.num_heads + config.num_kv_heads
        angles_T1h = self._fp32_zeros(num_tokens, 1, config.head_dim)
        cache_N2Kbh = self._cache_NL2Kbh[:, 0]
        num_staged = -(-num_tokens // cache_N2Kbh.shape[3])
        rows_T2Kh = self._zeros(num_tokens, 2, config.num_kv_heads, config.head_dim, dtype=cache_N2Kbh.dtype)
        stage_N2Kbh = torch.zeros_like(cache_N2Kbh[:num_staged])
        slots_T = torch.arange(num_tokens, device=cache_N2Kbh.device)
        for rows, stage in itertools.product((None, rows_T2Kh), (None, stage_N2Kbh)):
            yield rope_store_kv_launch(
                self._zeros(num_tokens, num_rotated + config.num_kv_heads, config.head_dim),
                angles_T1h,
                angles_T1h,
                cache_N2Kbh,
                slots_T,
                num_heads=config.num_heads,
                head_norm_Nh=self._fp32_zeros(num_rotated, config.head_dim) if config.qk_norm else None,
                eps=config.rms_norm_eps,
                rows_T2Kh=rows,
                stage_N2Kbh=stage,
                stage_slots_T=None if stage is None else slots_T,
            )

    def attention(self) -> Iterator[Launch]:
        """With each of the model's windows."""
        config, num_tokens = self._config, self._step.num_tokens
        qkv_TNh = self._zeros(num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        tensors = (
            qkv_TNh[:, : config.num_heads],
            self._cache_NL2Kbh[:, 0],
            self._sequences(),
            self._zeros(num_tokens, config.num_heads, config.head_dim),
        )
        for window in config.windows:
            if self._step.new_tokens <= MAX_NEW_TOKENS:
                yield from paged_attention_launches(*tensors, scale=config.attention_scale, window=window)
            else:
                yield prefill_attention_launch(*tensors, scale=config.attention_scale, window=window)

    def gated_activation(self) -> Launch:
        num_tokens, width = self._step.num_tokens, self._config.intermediate_size
        return gated_activation_launch(
            self._zeros(num_tokens, 2 * width), self._config.activation, self._zeros(num_tokens, width)
        )

    def block_copies(self) -> Iterator[Launch]:
        """The step's context to a contiguous buffer of the cache's dtype; and back."""
        cache_NL2Kbh = self._cache_NL2Kbh
        block_ids_n = torch.from_numpy(self._block_tables.reshape(-1)).to(cache_NL2Kbh.device)
        wire_nL2Kbh = self._zeros(len(block_ids_n), *cache_NL2Kbh.shape[1:], dtype=cache_NL2Kbh.dtype)
        checksums_n = self._zeros(len(block_ids_n), dtype=torch.int64)
        yield gather_blocks_launch(cache_NL2Kbh, block_ids_n, wire_nL2Kbh, checksums_n)
        yield scatter_blocks_launch(wire_nL2Kbh, block_ids_n, cache_NL2Kbh, checksums_n)

    def _sequences(self) -> Sequences:
        step = self._step
        starts = np.arange(step.num_sequences, dtype=np.int32) * step.new_tokens
        lengths, seq_lens = np.full_like(starts, step.new_tokens), np.full_like(starts, step.context)
        return Sequences.of_arrays(starts, lengths, seq_lens, self._block_tables, self._cache_NL2Kbh.device)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self._dtype, device=self._cache_NL2Kbh.device)

    def _fp32_zeros(self, *shape: int) -> torch.Tensor:
        return self._zeros(*shape, dtype=torch.float32)
