"""What must agree between two workers before KV may flow, in comparable form.

Knows which parts of a ModelConfig say how KV is computed and used; knows neither files nor sessions, nor
how config.json spells anything.
"""

from __future__ import annotations

import json
from typing import Any

from baton.model_config import ModelConfig
from baton.rope_config import RopeConfig
from baton.v1 import common_pb2


def first_difference(ours: common_pb2.Fingerprint, theirs: common_pb2.Fingerprint) -> str | None:
    """Name of the first field, in order of declaration, whose values differ; None when all agree."""
    for field in common_pb2.Fingerprint.DESCRIPTOR.fields:
        if getattr(ours, field.name) != getattr(theirs, field.name):
            return field.name
    return None


def canonical_rope(model: ModelConfig) -> str:
    """One JSON text for a model's rotary embeddings and the lengths at which their scale changes."""
    return _canonical({"embeddings": [_rope(rope) for rope in model.ropes], "steps": model.rope_steps})


def canonical_attention(model: ModelConfig) -> str:
    """One JSON text for what each layer's attention sees, with which embedding and how it is scaled.

    The longest sequence is part of it: a worker that knows a shorter one would end answers sooner.
    """
    return _canonical(
        {
            "architecture": model.architecture,
            "max_model_len": model.max_model_len,
            "ropes": [layer.rope for layer in model.layers],
            "scale": model.attention_scale,
            "windows": [layer.window for layer in model.layers],
        }
    )


def canonical_mlp(model: ModelConfig) -> str:
    """One JSON text for what a layer computes behind its attention, as far as weights do not say it."""
    moe = model.moe
    return _canonical(
        {
            "activation": model.activation,
            "chosen_experts": 0 if moe is None else moe.num_chosen,
            "moe_layers": [index for index, layer in enumerate(model.layers) if layer.is_moe],
            "norm_eps": model.rms_norm_eps,
            "normalizes": False if moe is None else moe.normalizes,
        }
    )


def _rope(rope: RopeConfig) -> dict[str, Any]:
    return {
        "type": rope.rope_type,
        "theta": rope.theta,
        "factor": rope.factor,
        "original_length": rope.original_length,
        "attention_factor": rope.attention_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
        "short_factors": rope.short_factors,
        "long_factors": rope.long_factors,
    }


def _canonical(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
