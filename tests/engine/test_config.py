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
        ("kv_memory_fraction", -0.1),
        ("kv_memory_fraction", 1.01),
        ("chunk_tokens", -1),
        ("threads", -1),
        ("max_running", 2048),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as raised:
        EngineConfig(**{field: value})

    assert raised.value.field == field


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        ("cpu", (256, 128, 64, 64, 0.2)),
        ("cuda", (4096, 2048, 512, 256, 0.9)),
        ("cuda:1", (4096, 2048, 512, 256, 0.9)),
    ],
)
def test_what_is_not_set_is_by_the_device(device: str, sizes: tuple[float, ...]) -> None:
    def sizes_of(config: EngineConfig) -> tuple[float, ...]:
        steps = (config.max_batch_tokens, config.chunk_tokens, config.mixed_tokens)
        return (*steps, config.max_running, config.kv_memory_fraction)

    assert sizes_of(EngineConfig(device=device)) == sizes
    assert sizes_of(EngineConfig(device=device, chunk_tokens=77)) == (sizes[0], 77, *sizes[2:])
