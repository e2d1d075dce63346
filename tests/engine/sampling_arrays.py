"""Sampling parameters of a step's rows, for tests that need no requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.batch import SamplingArrays


def arrays(count: int, **columns: Any) -> SamplingArrays:
    """Parameters of `count` rows; each column is one value for all rows, or one per row."""
    kinds = {
        "temperature": (0.0, np.float32),
        "top_k": (0, np.int64),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seed": (0, np.uint64),
        "position": (10, np.int64),
        "sample_index": (0, np.int64),
        "want_logprobs": (False, np.bool_),
    }
    filled = {
        name: np.broadcast_to(np.asarray(columns.get(name, default), dtype), (count,)).copy()
        for name, (default, dtype) in kinds.items()
    }
    return SamplingArrays(
        **filled, num_top_logprobs=columns.get("num_top_logprobs", 0), edits=columns.get("edits")
    )
