"""Single tokens that read the cache in place, against a dense softmax in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.cpu.attention import CpuAttention
from engine.cpu.attention_kernels import PART
from engine.cpu.chunk_choice import CASES, ChunkChoice
from tests.engine.model.paged_attention import PagedSequences

FP32, BF16 = torch.float32, torch.bfloat16
BLOCKED, FUSED = (CpuAttention(ChunkChoice(dict.fromkeys(CASES, fused))) for fused in (False, True))
# Of one token, beside a block's end, beside a part's end, of several parts.
LENGTHS = [1, 4, 5, PART - 1, PART, PART + 1, 2 * PART + 37]
WINDOWS = [0, 1, 3, 40, PART, PART + 3]


SHAPES: list[dict[str, Any]] = [
    {"heads": (6, 2), "head_dim": 10, "block_size": 4},
    {"heads": (3, 3), "head_dim": 24, "block_size": 16},
    {"heads": (8, 1), "head_dim": 6, "block_size": 5},
]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "off"), [(FP32, 2e-6), (BF16, 2**-8)])
def test_single_tokens_give_the_dense_softmax(
    shape: dict[str, Any], layout: str, dtype: torch.dtype, off: float
) -> None:
    sequences = PagedSequences(LENGTHS, **shape, layout=layout, dtype=dtype, code=BLOCKED)
    spans = [(length - 1, length) for length in LENGTHS]
    outputs = sequences.step(spans, WINDOWS)
    for window, of_sequences in outputs.items():
        for index, (output, (first, end)) in enumerate(zip(of_sequences, spans, strict=True)):
            expected = sequences.expected(index, first, end, window)
            torch.testing.assert_close(output.double(), expected, rtol=off, atol=off)


@pytest.mark.parametrize("code", [BLOCKED, FUSED], ids=["blocked", "fused"])
def test_prompts_and_single_tokens_share_a_step(code: CpuAttention) -> None:
    lengths = [9, 300, 40, 1]
    sequences = PagedSequences(lengths, code=code)
    spans = [(2, 9), (299, 300), (0, 40), (0, 1)]
    for window, outputs in sequences.step(spans, [0, 7]).items():
        for index, (output, (first, end)) in enumerate(zip(outputs, spans, strict=True)):
            expected = sequences.expected(index, first, end, window)
            torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_token_has_the_same_numbers_in_every_batch(dtype: torch.dtype) -> None:
    """Alone on one thread, and among others on several."""
    lengths = [700, 3, 900, 300, 1]
    sequences = PagedSequences(lengths, head_dim=32, block_size=16, dtype=dtype, code=BLOCKED)
    single = [(length - 1, length) for length in lengths]
    for window, together in sequences.step(single, [0, 100]).items():
        for index, output in enumerate(together):
            others = [(0, length) if length > 1 else (0, 1) for length in lengths]
            others[index] = single[index]
            assert torch.equal(sequences.step(others, [window])[window][index], output)


def test_scores_in_the_thousands_and_values_that_are_not_finite() -> None:
    sequences = PagedSequences([300, 300, 300], code=BLOCKED)
    sequences.k[0] += 4000.0
    sequences.v[1][17, 1, 3] = torch.nan
    sequences.k[2][290, 0, 2] = torch.inf
    first, second, third = sequences.step([(299, 300)] * 3, [0])[0]
    # All keys are moved alike, in steps of 2^-11 of 4096: a softmax in fp32 knows them still apart.
    torch.testing.assert_close(first.double(), sequences.expected(0, 299, 300, 0), rtol=0.02, atol=0.02)
    bad = ~second.isfinite()
    assert bad[0, 3:, 3].all()
    assert bad.sum() == 3
    # A query with a negative element there does not see that key.
    expected = sequences.expected(2, 299, 300, 0)
    assert 0 < expected.isnan().sum() < expected.numel()
    torch.testing.assert_close(third.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
