"""Rotary parameters as config.json spells them, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.errors import ModelError
from baton.rope_config import RopeConfig, ropes_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3],
    "original_max_position_embeddings": 4096,
}


def rope_of(config: dict[str, Any]) -> RopeConfig:
    return ropes_of(config)["full_attention"]


def test_older_spellings_mean_the_same() -> None:
    new = rope_of({"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}})
    assert new.original_length == 8192
    without_length = {key: value for key, value in LLAMA3.items() if not key.startswith("orig")}
    for older in (
        {"rope_scaling": LLAMA3},
        {"rope_scaling": without_length, "original_max_position_embeddings": 8192},
        {"rope_scaling": without_length, "max_position_embeddings": 8192},
    ):
        assert rope_of({"rope_theta": 500000.0, **older}) == new
    assert rope_of({"rope_scaling": {"type": "linear", "factor": 2}}).factor == 2.0


def test_the_length_outside_wins_as_in_phi3() -> None:
    config = {
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 2048,
        "max_position_embeddings": 8192,
    }
    rope = rope_of(config)
    assert rope.original_length == 2048
    assert rope.factor == 4.0
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(2048)))
    assert (rope.short_factors, rope.long_factors) == ((1.0, 1.5), (2.0, 3.0))


def test_defaults_are_the_architectures() -> None:
    assert rope_of({}).theta == 10000.0
    assert ropes_of({}, default_theta=1e6)["full_attention"].theta == 1e6
    assert ropes_of({"rope_theta": 5e5}, default_theta=1e6)["full_attention"].theta == 5e5
    two = ropes_of({}, default_theta=1e6, local_theta=1e4)
    assert {layer_type: rope.theta for layer_type, rope in two.items()} == {
        "full_attention": 1e6,
        "sliding_attention": 1e4,
    }


def test_parameters_by_layer_type() -> None:
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default"},
    }
    ropes = ropes_of({"rope_parameters": by_type}, default_theta=3e5, local_theta=1e4)
    assert ropes["full_attention"] == RopeConfig(rope_type="linear", factor=8.0, theta=1e6)
    assert ropes["sliding_attention"] == RopeConfig(theta=1e4)
    empty = ropes_of({"rope_parameters": by_type | {"sliding_attention": None}}, local_theta=2e4)
    assert empty["sliding_attention"] == RopeConfig(theta=2e4)


def test_equal_embeddings_are_equal_keys() -> None:
    config = {"rope_parameters": LONGROPE, "max_position_embeddings": 8192}
    assert len({rope_of(config), rope_of(config), rope_of({})}) == 2


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "mrope", "factor": 4.0}, "rope type 'mrope' is not supported; supported are default"),
        ({"type": "su"}, "rope type 'su'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta is 0; write a positive number"),
        ({"rope_type": "default", "rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rope_type": "default", "rope_theta": True}, "rope_theta is True"),
        ({"rope_type": "linear"}, "factor is None; write a number of at least 1"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"rope_type": "linear", "factor": math.inf}, "factor is inf"),
        ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings is None"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0; it must be above low_freq_factor"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (YARN | {"original_max_position_embeddings": 4096.5}, "original_max_position_embeddings is 4096.5"),
        (YARN | {"beta_fast": -1}, "beta_fast is -1"),
        (YARN | {"truncate": "no"}, "truncate is 'no'; write true or false"),
        (YARN | {"mscale": "x", "mscale_all_dim": 1}, "mscale is 'x'"),
        (YARN | {"attention_factor": 0}, "attention_factor is 0"),
        (YARN | {"factor": None}, "max_position_embeddings is None"),
        (LONGROPE, "max_position_embeddings is None"),
        (LONGROPE | {"factor": 2.0, "short_factor": 1.0}, "short_factor is 1.0; write a list"),
        (LONGROPE | {"factor": 2.0, "long_factor": [1.0, "x"]}, "long_factor is 'x'"),
        ([4.0], "rotary parameters are \\[4.0\\]"),
    ],
)
def test_what_is_not_usable_is_refused_by_name(parameters: Any, named: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: .*{named}"):
        ropes_of({"rope_parameters": parameters})


def test_two_spellings_that_differ_are_refused() -> None:
    by_type = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ModelError, match="rope_scaling stands beside rope_parameters by layer type"):
        ropes_of({"rope_parameters": by_type, "rope_scaling": {"type": "linear", "factor": 8.0}})
