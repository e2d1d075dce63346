"""The block size that a model and its traffic get."""

from __future__ import annotations

import pytest

from engine.block_size import DEFAULT_EXPECTED_TOKENS, choose_block_size

KIB = 1024


@pytest.mark.parametrize(
    ("bytes_per_token", "expected_tokens", "block_size"),
    [
        pytest.param(2 * 32 * 8 * 128 * 2, 291, 8, id="Llama-3.1-8B bf16: 8 tokens are 1 MiB"),
        pytest.param(2 * 30 * 3 * 64 * 2, 291, 64, id="SmolLM2-135M bf16: 46 tokens are 1 MiB"),
        pytest.param(2 * 30 * 3 * 64 * 4, 291, 32, id="SmolLM2-135M fp32: 23 tokens are 1 MiB"),
        pytest.param(2 * 32 * 32 * 128 * 2, 291, 8, id="Llama-2-7B bf16: the smallest is large enough"),
        pytest.param(64 * KIB, 291, 16, id="exactly 1 MiB in 16 tokens"),
        pytest.param(64 * KIB - 1, 291, 32, id="one byte less"),
        pytest.param(8 * KIB, 512, 128, id="64 of 512 tokens is an eighth"),
        pytest.param(8 * KIB, 511, 64, id="64 of 511 is more"),
        pytest.param(240, 291, 64, id="a tiny model takes the largest that fragmentation allows"),
        pytest.param(8 * KIB, 100, 16, id="short sequences: 8 of 100 is below an eighth, 16 above"),
        pytest.param(8 * KIB, 1, 8, id="too short for any"),
    ],
)
def test_the_smallest_block_that_is_large_enough(
    bytes_per_token: int, expected_tokens: int, block_size: int
) -> None:
    assert choose_block_size(bytes_per_token, expected_tokens) == block_size


def test_the_default_mix_is_its_arithmetic() -> None:
    prompt = 0.80 * (1 + 127) / 2 + 0.15 * (128 + 512) / 2 + 0.05 * (512 + 2048) / 2
    assert round(prompt + 128) == DEFAULT_EXPECTED_TOKENS
