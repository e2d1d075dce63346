"""The KV of made-up sequences, as arithmetic: what a storm of transfers must deliver, byte by byte.

Owns the numbers. All are small integers, exact in every dtype, so no conversion may change one.

Shape suffixes: T tokens, L layers, K the two of keys and values, H kv heads, D head dim.
"""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import torch

NUM_HEADS = 2
HEAD_DIM = 4
NUM_SEQUENCES = 8
MAX_TOKENS = 96

# None of them is a value of a sequence.
UNCOMPUTED = -200.0  # in a sender's block, before its tokens are computed and after they are forgotten
HELD = -3.0  # in place of tokens that the receiver holds: they must not be written there
RESERVED = -5.0  # in a receiver's block that was just reserved
FREE = -7.0  # in a receiver's block that nobody has


@cache
def _table(num_layers: int) -> torch.Tensor:
    num_rows = NUM_SEQUENCES * MAX_TOKENS
    index = np.arange(num_rows * num_layers * 2 * NUM_HEADS * HEAD_DIM, dtype=np.uint64)
    mixed = (index * np.uint64(2_654_435_761)) & np.uint64(0xFFFFFFFF)
    mixed ^= mixed >> np.uint64(15)
    mixed = (mixed * np.uint64(2_246_822_519)) & np.uint64(0xFFFFFFFF)
    values = (mixed >> np.uint64(13)) % np.uint64(250) + np.uint64(1)
    return torch.from_numpy(values.astype(np.float32)).view(num_rows, num_layers, 2, NUM_HEADS, HEAD_DIM)


def kv_of(sequence: int, first: int, end: int, num_layers: int) -> torch.Tensor:
    """The KV of tokens first .. end - 1 of a sequence, [T, L, K, H, D], integers 1 .. 250 in float32."""
    start = sequence * MAX_TOKENS
    return _table(num_layers)[start + first : start + end]


@cache
def tokens_of(sequence: int) -> list[int]:
    """The token ids of a sequence, by which its cached blocks are found."""
    return [1000 * sequence + token for token in range(MAX_TOKENS)]


@cache
def block_keys(sequence: int, block_size: int) -> list[bytes]:
    """The names of a sequence's full blocks."""
    return [struct.pack("<QQ", 1 + sequence, 1 + index) for index in range(MAX_TOKENS // block_size)]
