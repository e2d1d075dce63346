"""The kernels' calls of one step of a model: what is measured on a device, and what is compiled for others.

Made through the operators' own functions, so they are the calls that the engine makes. The step is uniform:
every sequence has as many new tokens and as much context. Tensors hold zeros: valid, and nobody's data.

Shape suffixes: T tokens, D hidden, H query heads, K kv heads, N all heads of q, k and v, h head_dim; of the
cache N blocks, n some of them, L layers, b block_size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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

# Of an embedding: enough for all tokens of a step to differ, and not a model's share of the memory.
_MAX_ROWS = 4096


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
    """One call of each kernel and of each of its variants, on the cache's device; as launch_makers()."""
    for make in launch_makers(config, step, cache_NL2Kbh, dtype):
        yield from make()


# Calls that are made together: those of one operator.
Maker = Callable[[], tuple[Launch, ...]]


def launch_makers(
    config: ModelConfig,
    step: Step,
    cache_NL2Kbh: torch.Tensor,
    dtype: torch.dtype,
    *,
    num_processors: int | None = None,
) -> tuple[Maker, ...]:
    """What makes the calls, and their tensors, in an order that is a model's.

    cache: as KVCache.logical, in its own dtype, with blocks enough for the step; written to.
    dtype: the weights'.  num_processors: of the device that the calls are for; None: the cache's.
    """
    calls = _Calls(config, step, cache_NL2Kbh, dtype, num_processors)
    has_mlp, has_experts = (
        any(layer.is_moe is is_moe for layer in config.layers) for is_moe in (False, True)
    )
    # Experts, whose MLPs are torch's, hand on fp32.
    delta_dtypes = dict.fromkeys((dtype, torch.float32) if has_experts else (dtype,))
    return (
        calls.embed_rms_norm_qkv,
        # Of the first layer, where embedding and product are the vendor's.
        partial(calls.add_rms_norm, None),
        *(partial(calls.add_rms_norm, delta_dtype) for delta_dtype in delta_dtypes),
        *(
            partial(calls.rope_store_kv, has_rows=has_rows, has_stage=has_stage)
            for has_rows, has_stage in itertools.product((False, True), repeat=2)
        ),
        *(partial(calls.attention, window) for window in config.windows),
        *([calls.gated_activation] if has_mlp else []),
        calls.gather_blocks,
        partial(calls.scatter_blocks, cache_NL2Kbh.dtype),
    )


def scatters_of_foreign_blocks(
    config: ModelConfig, cache_NL2Kbh: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> Iterator[Launch]:
    """What receives blocks of a peer whose cache has another dtype or layout than this one, one of each."""
    calls = _Calls(config, Step(num_sequences=1, new_tokens=1, context=1), cache_NL2Kbh, cache_NL2Kbh.dtype)
    for dtype, layout in itertools.product(dtypes, ("HND", "NHD")):
        yield from calls.scatter_blocks(dtype, layout)


class _Calls:
    """The calls of one step."""

    def __init__(
        self,
        config: ModelConfig,
        step: Step,
        cache_NL2Kbh: torch.Tensor,
        dtype: torch.dtype,
        num_processors: int | None = None,
    ) -> None:
        self._config = config
        self._step = step
        self._cache_NL2Kbh = cache_NL2Kbh
        self._dtype = dtype
        self._num_processors = num_processors
        self._block_tables = step.block_tables(cache_NL2Kbh.shape[4])

    def embed_rms_norm_qkv(self) -> tuple[Launch, ...]:
        config, num_tokens = self._config, self._step.num_tokens
        num_outputs = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        launch = embed_rms_norm_qkv_launch(
            self._zeros(num_tokens, dtype=torch.int64),
            self._zeros(self._num_rows(), config.hidden_size),
            self._fp32_zeros(config.hidden_size),
            config.rms_norm_eps,
            self._zeros(num_outputs, config.hidden_size),
            self._zeros(num_outputs) if config.attention_bias else None,
            self._fp32_zeros(num_tokens, config.hidden_size),
            self._zeros(num_tokens, num_outputs),
            embedding_scale=config.embedding_scale,
        )
        return (launch,)

    def add_rms_norm(self, delta_dtype: torch.dtype | None) -> tuple[Launch, ...]:
        """delta_dtype: None: nothing is added."""
        width = self._config.hidden_size
        rows = (self._step.num_tokens, width)
        has_delta_weight = delta_dtype is not None and self._config.post_norms
        launch = add_rms_norm_launch(
            self._fp32_zeros(*rows),
            None if delta_dtype is None else self._zeros(*rows, dtype=delta_dtype),
            self._fp32_zeros(width),
            self._config.rms_norm_eps,
            self._zeros(*rows),
            delta_weight_D=self._fp32_zeros(width) if has_delta_weight else None,
        )
        return (launch,)

    def rope_store_kv(self, *, has_rows: bool, has_stage: bool) -> tuple[Launch, ...]:
        """Into the cache; and into rows and a stage as well, if there are any."""
        config, num_tokens = self._config, self._step.num_tokens
        num_rotated = config.num_heads + config.num_kv_heads
        angles_T1h = self._fp32_zeros(num_tokens, 1, config.head_dim)
        cache_N2Kbh = self._cache_NL2Kbh[:, 0]
        num_staged = -(-num_tokens // cache_N2Kbh.shape[3])
        rows_T2Kh = self._zeros(num_tokens, 2, config.num_kv_heads, config.head_dim) if has_rows else None
        slots_T = torch.arange(num_tokens, device=cache_N2Kbh.device)
        launch = rope_store_kv_launch(
            self._zeros(num_tokens, num_rotated + config.num_kv_heads, config.head_dim),
            angles_T1h,
            angles_T1h,
            cache_N2Kbh,
            slots_T,
            num_heads=config.num_heads,
            head_norm_Nh=self._fp32_zeros(num_rotated, config.head_dim) if config.qk_norm else None,
            eps=config.rms_norm_eps,
            rows_T2Kh=rows_T2Kh,
            stage_N2Kbh=self._blocks(num_staged, 1, cache_N2Kbh.dtype)[:, 0] if has_stage else None,
            stage_slots_T=slots_T if has_stage else None,
        )
        return (launch,)

    def attention(self, window: int) -> tuple[Launch, ...]:
        """One call, or two for contexts that are split."""
        config, num_tokens = self._config, self._step.num_tokens
        qkv_TNh = self._zeros(num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        tensors = (
            qkv_TNh[:, : config.num_heads],
            self._cache_NL2Kbh[:, 0],
            self._sequences(),
            self._zeros(num_tokens, config.num_heads, config.head_dim),
        )
        if self._step.new_tokens <= MAX_NEW_TOKENS:
            return paged_attention_launches(*tensors, scale=config.attention_scale, window=window)
        return (prefill_attention_launch(*tensors, scale=config.attention_scale, window=window),)

    def gated_activation(self) -> tuple[Launch, ...]:
        num_tokens, width = self._step.num_tokens, self._config.intermediate_size
        launch = gated_activation_launch(
            self._zeros(num_tokens, 2 * width), self._config.activation, self._zeros(num_tokens, width)
        )
        return (launch,)

    def gather_blocks(self) -> tuple[Launch, ...]:
        """The step's context to a buffer of the cache's dtype, which lies as the cache does."""
        cache_NL2Kbh, block_ids_n = self._cache_NL2Kbh, self._block_ids()
        wire_nL2Kbh = self._blocks(len(block_ids_n), cache_NL2Kbh.shape[1], cache_NL2Kbh.dtype)
        return (gather_blocks_launch(cache_NL2Kbh, block_ids_n, wire_nL2Kbh),)

    def scatter_blocks(self, dtype: torch.dtype, layout: str = "") -> tuple[Launch, ...]:
        """And back. dtype, layout: the buffer's; its layout is the cache's unless given."""
        cache_NL2Kbh, block_ids_n = self._cache_NL2Kbh, self._block_ids()
        wire_nL2Kbh = self._blocks(len(block_ids_n), cache_NL2Kbh.shape[1], dtype, layout)
        return (scatter_blocks_launch(wire_nL2Kbh, block_ids_n, cache_NL2Kbh),)

    def _blocks(self, num_blocks: int, num_layers: int, dtype: torch.dtype, layout: str = "") -> torch.Tensor:
        """[n, L, 2, K, b, h]; in the cache's layout unless one is given."""
        num_kv_heads, block_size, head_dim = self._cache_NL2Kbh.shape[3:]
        is_nhd = self._cache_NL2Kbh.stride(3) <= self._cache_NL2Kbh.stride(4)
        if layout == "NHD" or (is_nhd and not layout):
            shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
            return self._zeros(*shape, dtype=dtype).transpose(3, 4)
        return self._zeros(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim, dtype=dtype)

    def _num_rows(self) -> int:
        """Of the embedding; all where nothing is allocated: AMD's compiler is told what is below 2 GiB."""
        num_rows = self._config.vocab_size
        return num_rows if self._cache_NL2Kbh.is_meta else min(num_rows, _MAX_ROWS)

    def _block_ids(self) -> torch.Tensor:
        return torch.from_numpy(self._block_tables.reshape(-1)).to(self._cache_NL2Kbh.device)

    def _sequences(self) -> Sequences:
        step = self._step
        starts = np.arange(step.num_sequences, dtype=np.int32) * step.new_tokens
        lengths, seq_lens = np.full_like(starts, step.new_tokens), np.full_like(starts, step.context)
        return Sequences.of_arrays(
            starts,
            lengths,
            seq_lens,
            self._block_tables,
            self._cache_NL2Kbh.device,
            num_processors=self._num_processors,
        )

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self._dtype, device=self._cache_NL2Kbh.device)

    def _fp32_zeros(self, *shape: int) -> torch.Tensor:
        return self._zeros(*shape, dtype=torch.float32)
