"""What becomes of keys and values that an element type cannot hold.

Owns the two rules for a worker's own KV. kvtransfer/conversion.py has the first one for KV that arrives, and
counts what it changes. Knows neither blocks nor layers.
"""

from __future__ import annotations

import torch


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the element type of a cache, rounded to nearest; the same tensor if that is x's.

    Finite values beyond float16's range, 65504, become its largest ones: attention to such a key stays what
    it was, a near certainty, where an infinity would end the request. What is not finite stays so.
    bfloat16 has the range of float32.
    """
    if dtype != torch.float16 or x.dtype == torch.float16:
        return x.to(dtype)
    # After the conversion: bfloat16 has no 65504.
    half, limit = x.to(dtype), torch.finfo(dtype).max
    return torch.where(x.isinf(), half, half.clamp(-limit, limit))


def infinities_to_nan_(x: torch.Tensor) -> torch.Tensor:
    """Makes NaN of infinities, in place; returns x.

    An infinite key may score minus infinity, which is how masked positions score: its token would be ignored
    without a trace. A NaN reaches the logits of every token that sees it, and ends the request by name.
    """
    return x.masked_fill_(x.isinf(), torch.nan)
