"""Numbers as each dtype holds them, by bit arithmetic of one element at a time."""

from __future__ import annotations

import struct

import numpy as np


def to_bytes(value: float, dtype: str) -> bytes:
    """An element of a payload; the value is exact in that dtype."""
    if dtype == "float16":
        return struct.pack("<e", value)
    return struct.pack("<f", value)[2 if dtype == "bfloat16" else 0 :]


def stored(value: float, dtype: str) -> float:
    """A float32 value as another dtype holds it: rounded to nearest, ties to even; saturating in float16."""
    if dtype == "float32":
        return value
    if dtype == "bfloat16":
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        bits += 0x7FFF + (bits >> 16 & 1)
        return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])
    if abs(value) >= 65520:  # half-way between 65504, the largest, and what would come next
        return 65504.0 if value > 0 else -65504.0
    return float(np.float16(value))
