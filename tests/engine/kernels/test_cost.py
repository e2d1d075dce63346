"""Bytes and operations of kernels against counts over real tensors, and the times that follow."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.kernels.cost import (
    GPUS,
    Cost,
    add_rms_norm,
    attention,
    block_copy,
    embed_rms_norm_qkv,
    embed_rms_norm_qkv_unfused,
    gated_activation,
    rope_store_kv,
)
from engine.kernels.model_launches import Step

HALF, SINGLE, IDS = torch.bfloat16, torch.float32, torch.int64


def nbytes(*tensors: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for dtype, shape in tensors)


def test_the_first_layers_front_reads_its_rows_and_weights_once() -> None:
    cost = embed_rms_norm_qkv(256, 4096, 6144, 2, has_bias=True)

    weights = [(HALF, (6144, 4096)), (HALF, (6144,)), (SINGLE, (4096,))]
    assert cost.read == nbytes((IDS, (256,)), (HALF, (256, 4096)), *weights)
    assert cost.written == nbytes((SINGLE, (256, 4096)), (HALF, (256, 6144)))
    assert cost.flops == 2 * 256 * 4096 * 6144


@pytest.mark.parametrize(("num_tokens", "saved"), [(256, 0.039), (5430, 0.38)])
def test_one_pass_saves_few_reads_of_short_prompts(num_tokens: int, saved: float) -> None:
    # Llama-2-7B, whose three passes would hand on 2-byte elements: 2T of 3T + O rows of D elements.
    sizes = (num_tokens, 4096, 3 * 4096, 2)
    fused, unfused = embed_rms_norm_qkv(*sizes, residual=2), embed_rms_norm_qkv_unfused(*sizes, residual=2)

    assert 1 - fused.read / unfused.read == pytest.approx(saved, abs=5e-4)
    assert 2 * num_tokens / (3 * num_tokens + 12288) == pytest.approx(saved, abs=5e-4)


def test_the_add_and_its_norm_read_and_write_the_residual_stream_once() -> None:
    cost = add_rms_norm(17, 576, 2, has_delta_norm=True)

    assert cost.read == nbytes((SINGLE, (17, 576)), (HALF, (17, 576)), (SINGLE, (576,)), (SINGLE, (576,)))
    assert cost.written == nbytes((SINGLE, (17, 576)), (HALF, (17, 576)))


def test_keys_and_values_are_written_once_more_to_a_stage() -> None:
    cost = rope_store_kv(10, 12, 3, 64, 2, has_stage=True, has_head_norm=True)

    angles = [(SINGLE, (10, 32)), (SINGLE, (10, 32))]
    assert cost.read == nbytes((HALF, (10, 18, 64)), *angles, (IDS, (2, 10)), (SINGLE, (15, 64)))
    assert cost.written == nbytes((HALF, (10, 18, 64)), (HALF, (10, 2, 3, 64)))


@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize(("new_tokens", "context"), [(1, 9), (9, 9), (3, 20)])
def test_attention_counts_what_each_query_sees(new_tokens: int, context: int, window: int) -> None:
    step = Step(num_sequences=5, new_tokens=new_tokens, context=context)
    pairs = [
        (query, key)
        for query, key in itertools.product(range(context - new_tokens, context), range(context))
        if key <= query and (not window or query - key < window)
    ]
    keys_seen = len({key for _, key in pairs})

    cost = attention(step, 6, 2, 8, 2, window=window)

    assert cost.flops == 5 * len(pairs) * 6 * 2 * (2 * 8)
    assert cost.read == nbytes((HALF, (5, new_tokens, 6, 8)), (HALF, (5, 2, keys_seen, 2, 8)))
    assert cost.written == nbytes((HALF, (5, new_tokens, 6, 8)))


def test_gates_and_copies_move_what_they_are_given() -> None:
    assert gated_activation(3, 100, 2) == Cost(read=1200, written=600)
    # Into half the bytes, with an id of 8 bytes and perhaps a checksum of 8.
    assert block_copy(4, 1000, 500) == Cost(read=4032, written=2000)
    assert block_copy(4, 1000, 500, has_checksum=True) == Cost(read=4032, written=2032)


def test_the_slower_of_memory_and_arithmetic_gives_the_time() -> None:
    a100, h100, h200 = GPUS
    moves, multiplies = Cost(read=2_000_000, written=2_078_000), Cost(read=8, written=8, flops=989_000_000)

    assert moves.seconds(a100) == pytest.approx(2e-6)
    assert moves.seconds(h200) < moves.seconds(h100) < moves.seconds(a100)
    assert multiplies.seconds(h100) == multiplies.seconds(h200) == pytest.approx(1e-6)
