"""Which settings an engine takes."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import ConfigError
from engine.config import EngineConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("kv_dtype", "fp8"),
        ("layout", "NDH"),
        ("block_size", -1),
        ("expected_tokens", 0),
        ("kv_cache_bytes", -1),
        ("kv_memory_fraction", 0.0),
        ("kv_memory_fraction", 1.01),
        ("chunk_tokens", 0),
        ("threads", -1),
        ("max_running", 2048),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as raised:
        EngineConfig(**{field: value})

    assert raised.value.field == field
