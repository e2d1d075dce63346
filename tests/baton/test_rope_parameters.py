"""config.json's spellings of rotary parameters, in one form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import LlamaConfig

from baton.errors import ModelError
from baton.rope_parameters import rope_parameters

PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "nothing",
    [
        {},
        {"rope_scaling": None},
        {"rope_parameters": {}},
        {"rope_theta": None, "partial_rotary_factor": None},
        {"rope_parameters": {"rope_theta": None, "factor": None, "rope_type": None}},
        {"rope_parameters": {"type": "default", "original_max_position_embeddings": 8}},
    ],
    ids=str,
)
def test_what_is_not_said_is_the_default(nothing: dict[str, Any]) -> None:
    assert rope_parameters(nothing) == {"full_attention": PLAIN}


def test_one_form_is_the_one_transformers_makes() -> None:
    for given in (
        {"rope_scaling": YARN, "max_position_embeddings": 4096},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 500.0},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 1024}},
        {"rope_parameters": YARN | {"rope_theta": 70.0}, "rope_theta": 500.0},
    ):
        # It writes into what it is given.
        theirs = dict(LlamaConfig(**copy.deepcopy(given)).rope_parameters)
        theirs.pop("type", None)
        config = {"max_position_embeddings": LlamaConfig().max_position_embeddings} | given
        assert rope_parameters(config)["full_attention"] == theirs | {"partial_rotary_factor": 1.0}


def test_layer_types_may_have_their_own() -> None:
    by_type = {"rope_parameters": {"full_attention": YARN, "sliding_attention": None}}
    ropes = rope_parameters(by_type | {"max_position_embeddings": 64}, default_theta=7.0, local_theta=5.0)
    assert ropes["full_attention"] == PLAIN | YARN | {
        "rope_theta": 7.0,
        "original_max_position_embeddings": 64,
    }
    assert ropes["sliding_attention"] == PLAIN | {"rope_theta": 5.0}
    # Where a model has one base for both, its windows have it too.
    assert rope_parameters(by_type, default_theta=7.0)["sliding_attention"]["rope_theta"] == 7.0


def test_a_base_for_windows_makes_two_embeddings_and_scales_one() -> None:
    config = {"rope_local_base_freq": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert rope_parameters(config, local_theta=5.0) == {
        "full_attention": PLAIN | {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": PLAIN | {"rope_theta": 9.0},
    }


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_what_is_no_table_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=r"config.json: rotary parameters are 'yarn'; write them as"):
        rope_parameters({key: "yarn"})
