"""What a model's rotary embeddings are, as config.json says it, and how long sequences may be with them.

Owns which values follow from others, every number checked. The spellings are baton/rope_parameters.py's,
the formulas engine/model/rope.py's. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ModelError
from baton.model_settings import positive_number, switch, whole_number
from baton.rope_parameters import FULL, ORIGINAL_LENGTH, rope_parameters

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# What transformers takes where config.json is silent; from the paper.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
_LENGTH = "max_position_embeddings"
# Qwen2.5-1M's way to be used beyond the length that it was trained on; it is not computed here.
DUAL_CHUNK = "dual_chunk_attention_config"
# fp32, in which angles are computed, does not know each position beyond; nor is any model that long.
LONGEST = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding, with everything resolved that config.json leaves to a rule.

    theta: base of the frequencies.  factor: how far it is stretched.
    original_length: tokens that the model was trained on before it was stretched.
    attention_factor: what cosines and sines are multiplied with.
    low_freq_factor, high_freq_factor: of llama3.  beta_fast, beta_slow, truncate: of yarn.
    short_factors, long_factors: of longrope, one for each frequency.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = _BETA_FAST
    beta_slow: float = _BETA_SLOW
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ModelError if longrope's factors are not as many as head_dim has frequencies."""
        if self.rope_type != "longrope":
            return
        for key, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if len(factors) != head_dim // 2:
                raise ModelError(
                    f"config.json: rope parameter {key} has {len(factors)} numbers; "
                    f"a head of {head_dim} elements needs {head_dim // 2}"
                )


def ropes_of(
    config: Mapping[str, Any], *, default_theta: float = 10000.0, local_theta: float | None = None
) -> dict[str, RopeConfig]:
    """The rotary embeddings of a model by layer type, from the content of config.json.

    Keys: "full_attention" and, for models with two, "sliding_attention". default_theta, local_theta: what
    the architecture has where config.json is silent; local_theta: of layers with a window.

    Raises ModelError naming the type or the parameter that is not supported.
    """
    ropes = rope_parameters(config, default_theta=default_theta, local_theta=local_theta)
    return {layer_type: _read(parameters, config) for layer_type, parameters in ropes.items()}


def max_model_len(config: Mapping[str, Any], *, local_theta: float | None = None) -> int:
    """Most tokens of prompt plus answer, from the content of config.json; local_theta: as of ropes_of().

    The rule is the one other servers use. linear and dynamic scaling stretch max_position_embeddings by
    their factor; yarn stretches the original length where it is given, else max_position_embeddings. For
    all others max_position_embeddings is the stretched length already, and so it is for models with two
    rotary embeddings, as Gemma 3. Nothing is stretched twice. Where a model asks for dual chunk attention,
    its original length is the most: that far it computes the same as without.

    Raises ModelError naming the key that is not usable, and for a length above LONGEST.
    """
    longest = _stretched_length(config, local_theta)
    if longest > LONGEST:
        raise ModelError(
            f"config.json: {_LENGTH} and the factor of the rotary embedding make {longest} tokens; positions "
            f"above {LONGEST} are not exact in fp32, lower them"
        )
    chunked = config.get(DUAL_CHUNK)
    if chunked is None:
        return longest
    if not isinstance(chunked, Mapping) or chunked.get(ORIGINAL_LENGTH) is None:
        raise ModelError(
            f"config.json: {DUAL_CHUNK} is {chunked!r}; dual chunk attention is not supported: "
            f"name in it the length that needs none, {ORIGINAL_LENGTH}, or remove it"
        )
    return min(longest, whole_number(chunked, ORIGINAL_LENGTH))


def _stretched_length(config: Mapping[str, Any], local_theta: float | None) -> int:
    length = whole_number(config, _LENGTH)
    ropes = rope_parameters(config, local_theta=local_theta)
    parameters = ropes[FULL]
    if len(ropes) > 1:
        return length
    if parameters["rope_type"] in ("linear", "dynamic"):
        return math.floor(length * _factor(parameters))
    if parameters["rope_type"] == "yarn" and parameters.get("factor") is not None:
        return math.floor(whole_number(parameters, ORIGINAL_LENGTH) * _factor(parameters))
    return length


def rope_steps(ropes: Iterable[RopeConfig], longest: int) -> tuple[int, ...]:
    """Rising lengths up to which each scale of the rotary embeddings serves; () if there is one scale only.

    dynamic NTK: the original length times 1, 2, 4, ..., the last cut at `longest`, which is max_model_len.
    longrope: the original length, then `longest`. See docs/adr/0008.
    """
    lengths: set[int] = set()
    for rope in ropes:
        if rope.rope_type == "dynamic":
            lengths.update(_doublings(rope.original_length, longest))
        elif rope.rope_type == "longrope":
            lengths.add(rope.original_length)
    shorter = sorted(length for length in lengths if length < longest)
    return (*shorter, longest) if shorter else ()


def _doublings(length: int, longest: int) -> list[int]:
    return [length << index for index in range(longest.bit_length()) if length << index < longest]


def _read(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> RopeConfig:
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if parameters["partial_rotary_factor"] != 1:
        raise ModelError(
            f"config.json: partial_rotary_factor is {parameters['partial_rotary_factor']!r}; "
            "only models that rotate whole heads are supported"
        )
    theta = positive_number(parameters, "rope_theta")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type=rope_type, theta=theta, factor=_factor(parameters))
    if rope_type == "dynamic":
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            factor=_factor(parameters),
            original_length=whole_number(config, _LENGTH),
        )
    scaled = {"yarn": _yarn, "llama3": _llama3, "longrope": _longrope}[rope_type]
    return scaled(parameters, config, theta)


def _llama3(parameters: Mapping[str, Any], _config: Mapping[str, Any], theta: float) -> RopeConfig:
    low, high = (
        positive_number(parameters, "low_freq_factor"),
        positive_number(parameters, "high_freq_factor"),
    )
    if low >= high:
        raise ModelError(
            f"config.json: rope parameter high_freq_factor is {high}; "
            f"it must be above low_freq_factor, which is {low}"
        )
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=_factor(parameters),
        original_length=whole_number(parameters, ORIGINAL_LENGTH),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(parameters: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> RopeConfig:
    factor = _stretch(parameters, config)
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_length=whole_number(parameters, ORIGINAL_LENGTH),
        attention_factor=_yarn_attention_factor(parameters, factor),
        beta_fast=positive_number(parameters, "beta_fast", _BETA_FAST),
        beta_slow=positive_number(parameters, "beta_slow", _BETA_SLOW),
        truncate=switch(parameters, "truncate", default=True),
    )


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return positive_number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        above, below = positive_number(parameters, "mscale"), positive_number(parameters, "mscale_all_dim")
        return _magnitude(factor, above) / _magnitude(factor, below)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(parameters: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> RopeConfig:
    original_length = whole_number(parameters, ORIGINAL_LENGTH)
    if original_length == 1:
        raise ModelError(f"config.json: {ORIGINAL_LENGTH} is 1; longrope needs it above 1")
    factor = _stretch(parameters, config)
    if parameters.get("attention_factor") is not None:
        attention_factor = positive_number(parameters, "attention_factor")
    elif factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_length))
    else:
        attention_factor = 1.0
    return RopeConfig(
        rope_type="longrope",
        theta=theta,
        factor=factor,
        original_length=original_length,
        attention_factor=attention_factor,
        short_factors=_numbers(parameters, "short_factor"),
        long_factors=_numbers(parameters, "long_factor"),
    )


def _stretch(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """The factor, or what the two lengths say where it is absent."""
    if parameters.get("factor") is not None:
        return _factor(parameters)
    lengths = whole_number(config, _LENGTH), whole_number(parameters, ORIGINAL_LENGTH)
    return lengths[0] / lengths[1]


def _factor(parameters: Mapping[str, Any]) -> float:
    """How far a rotary embedding is stretched."""
    factor = parameters.get("factor")
    if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 <= factor <= LONGEST:
        return float(factor)
    raise ModelError(
        f"config.json: rope parameter factor is {factor!r}; "
        f"write a number of at least 1 and at most {LONGEST}"
    )


def _numbers(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or not values:
        raise ModelError(f"config.json: rope parameter {key} is {values!r}; write a list of positive numbers")
    return tuple(positive_number({key: value}, key) for value in values)
