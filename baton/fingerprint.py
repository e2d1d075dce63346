"""What must agree between two workers before KV may flow, in comparable form.

Knows the meaning of config.json's rotary fields; knows neither files nor sessions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.v1 import common_pb2


def first_difference(ours: common_pb2.Fingerprint, theirs: common_pb2.Fingerprint) -> str | None:
    """Name of the first field, in order of declaration, whose values differ; None when all agree."""
    for field in common_pb2.Fingerprint.DESCRIPTOR.fields:
        if getattr(ours, field.name) != getattr(theirs, field.name):
            return field.name
    return None


def canonical_rope(config: Mapping[str, Any]) -> str:
    """One JSON text per rotary embedding, whichever spelling config.json uses.

    Understands rope_parameters (transformers 5) and rope_theta with rope_scaling (before).
    Absent values take transformers' defaults: theta 10000, type "default", all of each
    head rotated. Numbers become floats, keys are sorted.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    old_type = parameters.pop("type", "default")
    parameters.setdefault("rope_type", old_type)
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    original = config.get("original_max_position_embeddings")
    if original is not None:
        parameters.setdefault("original_max_position_embeddings", original)
    return json.dumps(_with_floats(parameters), sort_keys=True, separators=(",", ":"))


def _with_floats(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_floats(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
