"""How long a model's sequences may be, and at which lengths its rotary embedding changes its scale.

The one rule for both, for the processes that only read config.json as well as for those that run the
model. No torch, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelError
from baton.rope_parameters import FULL, ORIGINAL_LENGTH, is_by_layer_type, rope_parameters

_LENGTH = "max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """max_model_len: most tokens of prompt plus answer.  rope_steps: see rope_steps()."""

    max_model_len: int
    rope_steps: tuple[int, ...]


def context_length(config: Mapping[str, Any]) -> ContextLength:
    """Both, from the content of config.json; raises ModelError naming the key that is not usable."""
    return ContextLength(max_model_len=max_model_len(config), rope_steps=rope_steps(config))


def max_model_len(config: Mapping[str, Any]) -> int:
    """Most tokens of prompt plus answer.

    The rule is the one other servers use. linear and dynamic scaling stretch max_position_embeddings by
    their factor; yarn stretches the original length where it is given, else max_position_embeddings. For
    all others max_position_embeddings is the stretched length already, and so it is where rotary
    parameters are given by layer type, and for Gemma 3. Nothing is stretched twice.
    """
    length = whole_number(config, _LENGTH)
    if is_by_layer_type(config) or str(config.get("model_type", "")).startswith("gemma3"):
        return length
    parameters = rope_parameters(config)[FULL]
    rope_type = parameters["rope_type"]
    if rope_type in ("linear", "dynamic"):
        return math.floor(length * scale_factor(parameters))
    if rope_type == "yarn" and parameters.get("factor") is not None:
        return math.floor(whole_number(parameters, ORIGINAL_LENGTH) * scale_factor(parameters))
    return length


def rope_steps(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Rising lengths up to which each scale of the rotary embedding serves; () if it has one scale only.

    dynamic NTK: the original length times 1, 2, 4, ..., the last cut at max_model_len. longrope: the
    original length, then max_model_len. See docs/adr/0008.
    """
    longest = max_model_len(config)
    lengths: set[int] = set()
    for parameters in rope_parameters(config).values():
        if parameters["rope_type"] == "dynamic":
            lengths.update(_doublings(whole_number(config, _LENGTH), longest))
        elif parameters["rope_type"] == "longrope":
            lengths.add(whole_number(parameters, ORIGINAL_LENGTH))
    shorter = sorted(length for length in lengths if length < longest)
    return (*shorter, longest) if shorter else ()


def _doublings(length: int, longest: int) -> list[int]:
    return [length << index for index in range(longest.bit_length()) if length << index < longest]


def scale_factor(parameters: Mapping[str, Any]) -> float:
    """How far a rotary embedding is stretched; raises ModelError unless it is a number of at least 1."""
    factor = parameters.get("factor")
    if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 <= factor < math.inf:
        return float(factor)
    raise ModelError(f"config.json: rope parameter factor is {factor!r}; write a number of at least 1")


def whole_number(settings: Mapping[str, Any], key: str) -> int:
    """A positive integer of config.json; raises ModelError naming the key if it is none."""
    value = settings.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
