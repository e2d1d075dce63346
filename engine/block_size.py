"""How many tokens a block has, chosen once at start from the model and the expected lengths.

Pure arithmetic; knows neither the cache nor how much memory there is.
"""

from __future__ import annotations

BLOCK_SIZES = (8, 16, 32, 64, 128)
# KV moved in pieces of 64 KB took 3.6 times as long as in pieces of 1 MB (Mooncake on 4 x 200 Gb), so
# a block of all layers, one run of bytes, should reach the size that is known to be fast.
MIN_BLOCK_BYTES = 1 << 20
# Most of a mean sequence's memory that its last, half empty block may add. A twelfth would forbid 64
# tokens on the default mix, a sixth would allow 128 for sequences of 400.
MAX_FRAGMENTATION = 1 / 8
# Mean prompt of the long-tail mix (80 % below 128 tokens, 15 % to 511, 5 % from 512 to 2048, each part at
# its middle: 0.80 * 64 + 0.15 * 320 + 0.05 * 1280 = 163) and an answer of 128 tokens.
DEFAULT_EXPECTED_TOKENS = 291


def choose_block_size(bytes_per_token: int, expected_tokens: int) -> int:
    """The smallest of BLOCK_SIZES whose block reaches MIN_BLOCK_BYTES, if fragmentation allows it.

    bytes_per_token: KV of one token in all layers. expected_tokens: mean length of prompt and answer.

    A sequence leaves half of its last block empty on average, so a size b wastes b / 2 tokens per
    sequence; sizes with b / 2 > MAX_FRAGMENTATION * expected_tokens are out. If no other reaches
    MIN_BLOCK_BYTES, the largest of them is taken; sequences too short for any of them get the smallest size.

    >>> choose_block_size(131_072, 291)  # Llama-3.1-8B in bfloat16: 8 tokens are 1 MiB
    8
    >>> choose_block_size(23_040, 291)  # SmolLM2-135M in bfloat16: 46 tokens are 1 MiB
    64
    """
    allowed = [size for size in BLOCK_SIZES if size / 2 <= MAX_FRAGMENTATION * expected_tokens]
    large = [size for size in allowed if size * bytes_per_token >= MIN_BLOCK_BYTES]
    return min(large, default=max(allowed, default=BLOCK_SIZES[0]))
