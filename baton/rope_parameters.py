"""The rotary parameters of config.json in one form, whichever of its spellings a model has.

Owns which key means what. It knows neither values (baton/rope_config.py) nor formulas
(engine/model/rope.py), and opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL_LENGTH = "original_max_position_embeddings"
_SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


def rope_parameters(
    config: Mapping[str, Any], *, default_theta: float = 10000.0, local_theta: float | None = None
) -> dict[str, dict[str, Any]]:
    """The rotary parameters by layer type: "full_attention", and "sliding_attention" if that has its own.

    Each has at least rope_type, rope_theta and partial_rotary_factor, and original_max_position_embeddings
    where its type needs one. Read are rope_parameters, flat or by layer type, and the older rope_theta,
    rope_scaling and rope_local_base_freq; precedence and defaults are those of transformers'
    RotaryEmbeddingConfigMixin. A null says nothing.

    default_theta: the architecture's.  local_theta: that of its layers with a window, where they have one.
    Raises ModelError for parameters that are no table, or are there twice.
    """
    given = _given(config)
    theta = _or_default(config.get("rope_theta"), default_theta)
    local = _or_default(config.get("rope_local_base_freq"), local_theta)
    if not any(layer_type in given for layer_type in (FULL, SLIDING)):
        ropes = {FULL: _completed(_with_original(given, config), theta, config)}
        return ropes if local is None else {**ropes, SLIDING: _completed({}, local, config)}
    sliding_theta = theta if local is None else local
    return {
        FULL: _completed(_table(given.get(FULL) or {}), theta, config),
        SLIDING: _completed(_table(given.get(SLIDING) or {}), sliding_theta, config),
    }


def _given(config: Mapping[str, Any]) -> Mapping[str, Any]:
    old, new = _table(config.get("rope_scaling") or {}), _table(config.get("rope_parameters") or {})
    if old and any(layer_type in new for layer_type in (FULL, SLIDING)):
        raise ModelError(
            "config.json: rope_scaling stands beside rope_parameters by layer type; move it into these"
        )
    return old or new


def _table(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ModelError(f"config.json: rotary parameters are {value!r}; write them as a JSON object")


def _with_original(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    # Phi-3 and some others keep it outside; transformers lets that win.
    original = config.get(ORIGINAL_LENGTH)
    return parameters if original is None else {**parameters, ORIGINAL_LENGTH: original}


def _completed(parameters: Mapping[str, Any], theta: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    complete = {key: value for key, value in parameters.items() if key != "type" and value is not None}
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    complete["rope_type"] = rope_type
    complete.setdefault("rope_theta", theta)
    complete.setdefault("partial_rotary_factor", _or_default(config.get("partial_rotary_factor"), 1.0))
    if rope_type in _SCALED_FROM_ORIGINAL:
        complete.setdefault(ORIGINAL_LENGTH, config.get("max_position_embeddings"))
    else:
        complete.pop(ORIGINAL_LENGTH, None)
    return complete


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value
