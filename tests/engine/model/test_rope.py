"""Rotary tables against transformers' frequencies and against exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.errors import ModelError
from engine.model.rope import RopeConfig, rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": LLAMA3 | {"rope_theta": 500000.0},
}


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_tables_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    positions = torch.arange(300)
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])

    cos, sin = rope_table(RopeConfig.from_hf(config.to_dict()), 64, 300, torch.device("cpu"))

    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=3e-5)
    torch.testing.assert_close(sin[:, 32:], expected_sin[0, :, 32:], rtol=0, atol=3e-5)
    torch.testing.assert_close(sin[:, :32], -expected_sin[0, :, :32], rtol=0, atol=3e-5)


def test_the_older_keys_mean_the_same() -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
    older = {
        "rope_theta": 500000.0,
        "original_max_position_embeddings": 8192,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if not key.startswith("orig")},
    }
    new = RopeConfig.from_hf({"rope_parameters": CASES["llama3"]})

    assert RopeConfig.from_hf(old) == new
    assert RopeConfig.from_hf(older) == new
    assert RopeConfig.from_hf({"rope_scaling": {"type": "linear", "factor": 2}}).factor == 2.0


def test_angles_far_out_keep_fp32_accuracy() -> None:
    # An fp32 product of position and frequency would be off by 1e-3 turns here.
    position = 131071
    config = RopeConfig(theta=500000.0)

    cos, _ = rope_table(config, 64, position + 1, torch.device("cpu"))

    for index in (0, 1, 7):
        exact = math.cos(position * 500000.0 ** (-2 * index / 64))
        assert cos[position, index].item() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "yarn"),
        ({"rope_type": "dynamic", "factor": 4.0}, "dynamic"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_other_types_are_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        RopeConfig.from_hf({"rope_parameters": parameters})
