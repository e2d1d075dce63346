"""Rotary parameters as config.json spells them, the lengths of published models, what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.errors import ModelError
from baton.rope_config import RopeConfig, max_model_len, rope_steps, ropes_of

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
        (
            LONGROPE | {"original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; longrope",
        ),
        (LLAMA3 | {"factor": 1e300}, "factor is 1e\\+300; write a number of at least 1 and at most 16777216"),
        ({"rope_type": "default", "rope_theta": 10**400}, "rope_theta is 10{400}; write a positive number"),
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


# Of Qwen2.5-7B-Instruct-1M.
DUAL_CHUNK = {
    "dual_chunk_attention_config": {
        "chunk_size": 262_144,
        "local_size": 8192,
        "original_max_position_embeddings": 262_144,
    }
}


def scaled(length: Any, **rope: Any) -> dict[str, Any]:
    return {"max_position_embeddings": length, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (scaled(8192), 8192),
        (scaled(2048, rope_type="linear", factor=2.5), 5120),
        (scaled(2047, rope_type="linear", factor=1.5), 3070),
        (scaled(2048, rope_type="dynamic", factor=4), 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
        (scaled(4096, rope_type="yarn", factor=16.0), 65_536),
        (scaled(65_536, rope_type="yarn", factor=16.0, original_max_position_embeddings=4096), 65_536),
        (scaled(32_768, rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768), 131_072),
        (scaled(163_840, rope_type="yarn", factor=40.0, original_max_position_embeddings=4096), 163_840),
        (scaled(65_536, rope_type="yarn", factor=None, original_max_position_embeddings=4096), 65_536),
        (scaled(131_072, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192), 131_072),
        (scaled(131_072, **LONGROPE), 131_072),
        (scaled(1 << 24), 16_777_216),
        (scaled(1_010_000) | DUAL_CHUNK, 262_144),
        (scaled(1_010_000, rope_type="yarn", factor=4.0) | DUAL_CHUNK, 262_144),
        (scaled(32_768) | DUAL_CHUNK, 32_768),
        (scaled(32_768) | {"dual_chunk_attention_config": None}, 32_768),
        (
            scaled(131_072, full_attention={"rope_type": "linear", "factor": 8.0}, sliding_attention={}),
            131_072,
        ),
    ],
)
def test_the_longest_sequence(given: dict[str, Any], expected: int) -> None:
    assert max_model_len(given) == expected


def test_a_model_whose_windows_have_their_own_embedding_is_not_stretched() -> None:
    # Gemma 3's 131,072 are what its factor of 8 has made of 16,384.
    given = {"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert max_model_len(given, local_theta=10_000.0) == 131_072
    assert max_model_len(given | {"rope_local_base_freq": 10_000.0}) == 131_072
    assert max_model_len(given) == 1_048_576


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (scaled(8192), ()),
        (scaled(2048, rope_type="linear", factor=4.0), ()),
        (scaled(32_768, rope_type="yarn", factor=4.0), ()),
        (scaled(2048, rope_type="dynamic", factor=4.0), (2048, 4096, 8192)),
        (scaled(2048, rope_type="dynamic", factor=3.0), (2048, 4096, 6144)),
        (scaled(100, rope_type="dynamic", factor=1.5), (100, 150)),
        (scaled(2048, rope_type="dynamic", factor=1.0), ()),
        (scaled(131_072, **LONGROPE), (4096, 131_072)),
        (scaled(4096, **LONGROPE), ()),
    ],
)
def test_where_the_scale_changes(given: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert rope_steps(ropes_of(given).values(), max_model_len(given)) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "max_position_embeddings is None; it must be a positive integer"),
        (scaled("8k"), "max_position_embeddings is '8k'"),
        (scaled(True), "max_position_embeddings is True"),
        (scaled(0), "max_position_embeddings is 0"),
        (scaled(2048, rope_type="dynamic", factor="4"), "factor is '4'; write a number of at least 1"),
        (scaled(2048, rope_type="yarn", factor=0.5), "factor is 0.5"),
        (
            scaled(2048, rope_type="yarn", factor=2.0, original_max_position_embeddings=-1),
            "original_max_position_embeddings is -1",
        ),
        (scaled((1 << 24) + 1), "make 16777217 tokens; positions above 16777216 are not exact in fp32"),
        (scaled(4096, rope_type="linear", factor=8192.0), "make 33554432 tokens"),
        (scaled(4096, rope_type="yarn", factor=1e300), "factor is 1e\\+300; .* at most 16777216"),
        (scaled(4096, rope_type="dynamic", factor=10**400), "factor is 10{400}; .* at most 16777216"),
        (scaled(4096) | {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is"),
        (scaled(4096) | {"dual_chunk_attention_config": True}, "dual_chunk_attention_config is True"),
    ],
)
def test_a_length_that_is_not_usable_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: .*{named}"):
        max_model_len(given)
