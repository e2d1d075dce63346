"""What becomes of keys and values that an element type cannot hold, inside a kernel.

The rules are engine/model/kv_range.py's, which says why they are so; these are their Triton functions, called
by the kernels that write KV.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """x in another element type: rounded to nearest, finite values beyond float16 its largest ones."""
    if x.dtype == dtype:
        # Not through float32: a copy keeps the bits, those of a NaN too.
        result = x
    else:
        wide = x.to(tl.float32)
        if dtype == tl.float16:
            size = tl.abs(wide)
            largest = tl.where(wide > 0, 65504.0, -65504.0)
            wide = tl.where((size > 65504.0) & (size < float("inf")), largest, wide)
        result = wide.to(dtype)
    return result


@triton.jit
def marked(x):
    """x of a model's own element type; NaN where it is float16 and infinite."""
    if x.dtype == tl.float16:
        wide = x.to(tl.float32)
        x = tl.where(tl.abs(wide) == float("inf"), float("nan"), wide).to(tl.float16)
    return x
