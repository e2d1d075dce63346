"""How long sequences may be: the numbers of published models, and where their scale changes."""

from __future__ import annotations

from typing import Any

import pytest

from baton.context_length import context_length, max_model_len, rope_steps
from baton.errors import ModelError


def config(length: Any, **rope: Any) -> dict[str, Any]:
    return {"max_position_embeddings": length, "rope_parameters": rope}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(8192), 8192),
        (config(2048, rope_type="linear", factor=2.5), 5120),
        (config(2047, rope_type="linear", factor=1.5), 3070),
        (config(2048, rope_type="dynamic", factor=4), 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
        (config(4096, rope_type="yarn", factor=16.0), 65_536),
        (config(65_536, rope_type="yarn", factor=16.0, original_max_position_embeddings=4096), 65_536),
        (config(32_768, rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768), 131_072),
        (config(163_840, rope_type="yarn", factor=40.0, original_max_position_embeddings=4096), 163_840),
        (config(65_536, rope_type="yarn", factor=None, original_max_position_embeddings=4096), 65_536),
        (config(131_072, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192), 131_072),
        (config(131_072, **LONGROPE, original_max_position_embeddings=4096), 131_072),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131_072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131_072,
        ),
        (
            config(131_072, full_attention={"rope_type": "linear", "factor": 8.0}, sliding_attention={}),
            131_072,
        ),
    ],
)
def test_the_longest_sequence(given: dict[str, Any], expected: int) -> None:
    assert max_model_len(given) == expected
    assert context_length(given).max_model_len == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(8192), ()),
        (config(2048, rope_type="linear", factor=4.0), ()),
        (config(32_768, rope_type="yarn", factor=4.0), ()),
        (config(2048, rope_type="dynamic", factor=4.0), (2048, 4096, 8192)),
        (config(2048, rope_type="dynamic", factor=3.0), (2048, 4096, 6144)),
        (config(100, rope_type="dynamic", factor=1.5), (100, 150)),
        (config(2048, rope_type="dynamic", factor=1.0), ()),
        (config(131_072, **LONGROPE, original_max_position_embeddings=4096), (4096, 131_072)),
        (config(4096, **LONGROPE, original_max_position_embeddings=4096), ()),
    ],
)
def test_where_the_scale_changes(given: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert rope_steps(given) == expected
    assert context_length(given).rope_steps == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "max_position_embeddings is None; it must be a positive integer"),
        (config("8k"), "max_position_embeddings is '8k'"),
        (config(True), "max_position_embeddings is True"),
        (config(0), "max_position_embeddings is 0"),
        (config(2048, rope_type="dynamic", factor="4"), "factor is '4'; write a number of at least 1"),
        (config(2048, rope_type="yarn", factor=0.5), "factor is 0.5"),
        (
            config(2048, rope_type="yarn", factor=2.0, original_max_position_embeddings=-1),
            "original_max_position_embeddings is -1",
        ),
    ],
)
def test_what_is_not_usable_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: .*{named}"):
        context_length(given)
