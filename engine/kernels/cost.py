"""What each kernel must move and compute at the least, from shapes, and the time that takes at the least.

Every input is counted as read once and every output as written once, whatever caches do; temporaries, such as
the pieces of a split context, are not counted. Only matrix products count as operations, two for each
multiplication with its addition: the rest hides behind memory. Time = max(bytes / bandwidth, operations /
peak), the roofline of Williams, Waterman and Patterson (2009): no kernel is faster.

Symbols: T tokens, D hidden, O outputs, F intermediate, H query heads, K kv heads, h head_dim, c context of a
sequence, q its new tokens, B sequences, s bytes of an element, r bytes of one of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.model_config import ModelConfig
from engine.kernels.model_launches import Step

_FP32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """flops: of dense bf16 products per second.  bandwidth: bytes per second."""

    name: str
    flops: float
    bandwidth: float


# NVIDIA's data sheets: "A100 Tensor Core GPU" (80 GB SXM), "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core
# GPU" (SXM). The latter two print 1,979 TFLOP/s, which is with sparsity: half of it is dense.
GPUS = (
    Gpu(name="A100", flops=312e12, bandwidth=2.039e12),
    Gpu(name="H100", flops=989e12, bandwidth=3.35e12),
    Gpu(name="H200", flops=989e12, bandwidth=4.8e12),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """read, written: bytes.  flops: of matrix products."""

    read: int
    written: int
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            read=self.read + other.read, written=self.written + other.written, flops=self.flops + other.flops
        )

    def seconds(self, gpu: Gpu) -> float:
        """The roofline's time."""
        return max((self.read + self.written) / gpu.bandwidth, self.flops / gpu.flops)


def embedding(num_tokens: int, width: int, itemsize: int, *, residual: int = _FP32) -> Cost:
    """Reads 8T of ids and sTD of rows, writes rTD."""
    return Cost(
        read=num_tokens * (_INT64 + itemsize * width),
        written=residual * num_tokens * width,
    )


def rms_norm(num_tokens: int, width: int, itemsize: int, *, residual: int = _FP32) -> Cost:
    """Reads rTD and 4D of weights, writes sTD."""
    return Cost(
        read=residual * num_tokens * width + _FP32 * width,
        written=itemsize * num_tokens * width,
    )


def linear(num_tokens: int, width: int, num_outputs: int, itemsize: int, *, has_bias: bool = False) -> Cost:
    """Reads sTD, sOD of weights and sO of bias, writes sTO; 2TDO operations."""
    return Cost(
        read=itemsize * (num_tokens * width + num_outputs * width + num_outputs * has_bias),
        written=itemsize * num_tokens * num_outputs,
        flops=2 * num_tokens * width * num_outputs,
    )


def embed_rms_norm_qkv(
    num_tokens: int,
    width: int,
    num_outputs: int,
    itemsize: int,
    *,
    has_bias: bool = False,
    residual: int = _FP32,
) -> Cost:
    """embedding(), rms_norm() and linear() less what they hand on: rTD and sTD are not read again."""
    unfused = embed_rms_norm_qkv_unfused(
        num_tokens, width, num_outputs, itemsize, has_bias=has_bias, residual=residual
    )
    return Cost(
        read=unfused.read - (residual + itemsize) * num_tokens * width,
        written=unfused.written - itemsize * num_tokens * width,
        flops=unfused.flops,
    )


def embed_rms_norm_qkv_unfused(
    num_tokens: int,
    width: int,
    num_outputs: int,
    itemsize: int,
    *,
    has_bias: bool = False,
    residual: int = _FP32,
) -> Cost:
    """The same in three passes."""
    return (
        embedding(num_tokens, width, itemsize, residual=residual)
        + rms_norm(num_tokens, width, itemsize, residual=residual)
        + linear(num_tokens, width, num_outputs, itemsize, has_bias=has_bias)
    )


def add_rms_norm(num_tokens: int, width: int, itemsize: int, *, has_delta_norm: bool = False) -> Cost:
    """Reads 4TD, sTD and 4D of each norm's weights; writes 4TD and sTD."""
    return Cost(
        read=(_FP32 + itemsize) * num_tokens * width + _FP32 * width * (1 + has_delta_norm),
        written=(_FP32 + itemsize) * num_tokens * width,
    )


def rope_store_kv(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    has_stage: bool = False,
    has_head_norm: bool = False,
) -> Cost:
    """Reads sT(H + 2K)h, half of cos and sin, 4Th, 8T of slots and the norms, 4(H + K)h.

    Writes sT(H + 2K)h; with a stage 2sTKh once more, and reads 8T more of slots.
    """
    heads = itemsize * num_tokens * (num_heads + 2 * num_kv_heads) * head_dim
    norms = _FP32 * (num_heads + num_kv_heads) * head_dim * has_head_norm
    slots = _INT64 * (1 + has_stage)
    staged = 2 * itemsize * num_tokens * num_kv_heads * head_dim * has_stage
    return Cost(read=heads + num_tokens * (_FP32 * head_dim + slots) + norms, written=heads + staged)


def attention(
    step: Step, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, *, window: int = 0
) -> Cost:
    """Causal. Reads sBqHh of queries and 2sBcKh of keys and values, writes sBqHh.

    4h operations for each pair of a query and a key that it sees, in each of H heads.
    """
    first = step.context - step.new_tokens + 1
    seen = [min(keys, window or keys) for keys in range(first, step.context + 1)]
    queries = itemsize * step.num_tokens * num_heads * head_dim
    # What the first query sees, and the new tokens behind it.
    keys = min(step.context, seen[0] + step.new_tokens - 1)
    return Cost(
        read=queries + 2 * itemsize * step.num_sequences * keys * num_kv_heads * head_dim,
        written=queries,
        flops=4 * head_dim * num_heads * step.num_sequences * sum(seen),
    )


def gated_activation(num_tokens: int, width: int, itemsize: int) -> Cost:
    """Reads 2sTF, writes sTF."""
    return Cost(read=2 * itemsize * num_tokens * width, written=itemsize * num_tokens * width)


def block_copy(
    num_blocks: int,
    bytes_per_block: int,
    bytes_per_wire_block: int | None = None,
    *,
    has_checksum: bool = False,
) -> Cost:
    """Gather: reads blocks, writes them in the wire's dtype; 8 bytes of id each, and 8 of a checksum."""
    wire = bytes_per_block if bytes_per_wire_block is None else bytes_per_wire_block
    return Cost(
        read=num_blocks * (bytes_per_block + _INT64), written=num_blocks * (wire + _INT64 * has_checksum)
    )


def step_costs(config: ModelConfig, step: Step, itemsize: int) -> dict[str, Cost]:
    """One call of each kernel in a step, by name; attention without a window.

    Of a prefill, also what sending it needs: a stage, or else a copy of all layers' KV of its context.
    """
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    num_outputs = (heads[0] + 2 * heads[1]) * heads[2]
    num_tokens, width = step.num_tokens, config.hidden_size
    is_prefill = step.new_tokens > 1
    costs = {
        "embed_rms_norm_qkv": embed_rms_norm_qkv(
            num_tokens, width, num_outputs, itemsize, has_bias=config.attention_bias
        ),
        "add_rms_norm": add_rms_norm(num_tokens, width, itemsize, has_delta_norm=config.post_norms),
        "rope_store_kv": rope_store_kv(
            num_tokens, *heads, itemsize, has_stage=is_prefill, has_head_norm=config.qk_norm
        ),
        "prefill_attention" if is_prefill else "paged_attention": attention(step, *heads, itemsize),
        "gated_activation": gated_activation(num_tokens, config.intermediate_size, itemsize),
    }
    if is_prefill:
        bytes_per_sequence = 2 * config.num_layers * heads[1] * heads[2] * itemsize * step.context
        costs["block_copy"] = block_copy(step.num_sequences, bytes_per_sequence)
    return costs
