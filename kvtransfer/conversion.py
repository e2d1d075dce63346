"""Conversion: the values of a payload in the element type of a cache.

Owns the arithmetic between float32, bfloat16 and float16 and its scratch memory. Must
not know blocks, layouts or frames: values come and go as flat arrays of bits, in
unsigned integers of the element's size, because numpy has no bfloat16.

Runs on an event loop beside the thread of the engine, so on one thread only.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Bits = NDArray[Any]
_BITS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}
_EXPONENT = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80}
# Up to this many elements (its grain size) torch does not share an operation among threads.
_NUM_PIECE_VALUES = 1 << 15
# A payload is read-only; the tensors made from it here are only ever read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Conversion:
    """Into one element type, `dtype`. Not for use by two threads at once."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Kept from call to call: fresh memory costs as much in page faults as the conversion.
        self._scratch: Bits = np.empty(0, dtype=_BITS[dtype])
        self._wide = torch.empty(_NUM_PIECE_VALUES)

    def convert(self, payload: memoryview, dtype: str) -> tuple[Bits, NDArray[np.bool_] | None]:
        """The bits of a payload's values, and which finite values were too large and are saturated.

        The bits are good until the next call; without a change of type they are the payload
        itself. None for the second says that there are none. NaN and infinity stay what they
        are: they must end the request by name, not hide as large numbers.
        """
        source_dtype = DTYPES[dtype]
        source = np.frombuffer(payload, dtype=_BITS[source_dtype])
        if source_dtype == self._dtype:
            return source, None
        result = self._room(source.size)
        if (source_dtype, self._dtype) == (torch.bfloat16, torch.float32):
            # A bfloat16 is the upper half of a float32; numpy is faster here than torch in pieces.
            np.copyto(result, source)
            np.left_shift(result, 16, out=result)
        else:
            self._convert_in_pieces(
                torch.from_numpy(source).view(source_dtype), torch.from_numpy(result).view(self._dtype)
            )
        if self._dtype != torch.float16:
            return result, None
        return result, _saturate(result, source, _EXPONENT[source_dtype])

    def _room(self, num_values: int) -> Bits:
        if self._scratch.size < num_values:
            self._scratch = np.empty(num_values, dtype=self._scratch.dtype)
        return self._scratch[:num_values]

    def _convert_in_pieces(self, source: torch.Tensor, target: torch.Tensor) -> None:
        # torch has vector code from and to float32 only; float32 holds both others exactly.
        is_direct = torch.float32 in (source.dtype, target.dtype)
        for first in range(0, len(source), _NUM_PIECE_VALUES):
            piece = source[first : first + _NUM_PIECE_VALUES]
            if not is_direct:
                piece = self._wide[: len(piece)].copy_(piece)
            target[first : first + _NUM_PIECE_VALUES].copy_(piece)


def _saturate(half: Bits, source: Bits, exponent: int) -> NDArray[np.bool_] | None:
    """Replaces infinities that were finite values by the largest float16; says where, None if nowhere.

    half, source: bits of the float16s and of what they came from. exponent: the exponent bits of the latter.
    """
    # Read as signed bits, +infinity and NaN are the largest; as unsigned, -infinity and NaN.
    if half.view(np.int16).max() < 0x7C00 and half.max() < 0xFC00:
        return None
    excess: NDArray[np.bool_] = ((half & 0x7FFF) == 0x7C00) & ((source & exponent) != exponent)
    if not excess.any():
        return None
    # In bits, the largest finite number comes right before infinity, with either sign.
    half -= excess
    return excess
