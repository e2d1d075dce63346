"""What must agree between two workers before KV may flow, in comparable form.

Knows which fields of config.json say how KV is computed and used; knows neither files nor sessions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.rope_parameters import FULL, rope_parameters
from baton.v1 import common_pb2

# Who sees whom in attention, and the length that a dynamic scale begins at.
_ATTENTION = (
    "architectures",
    "max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "sliding_window_pattern",
)


def first_difference(ours: common_pb2.Fingerprint, theirs: common_pb2.Fingerprint) -> str | None:
    """Name of the first field, in order of declaration, whose values differ; None when all agree."""
    for field in common_pb2.Fingerprint.DESCRIPTOR.fields:
        if getattr(ours, field.name) != getattr(theirs, field.name):
            return field.name
    return None


def canonical_rope(config: Mapping[str, Any]) -> str:
    """One JSON text for a model's rotary embeddings, whichever spelling config.json uses.

    Understands what baton/rope_parameters.py does. Numbers become floats, keys are sorted; where all layers
    share one embedding, its parameters are the text.
    """
    ropes = rope_parameters(config)
    return _canonical(ropes if len(ropes) > 1 else ropes[FULL])


def canonical_attention(config: Mapping[str, Any]) -> str:
    """One JSON text for what config.json says of the attention masks; what it does not say is left out."""
    return _canonical({key: config[key] for key in _ATTENTION if config.get(key) is not None})


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(_with_floats(value), sort_keys=True, separators=(",", ":"))


def _with_floats(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_floats(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
