"""How many blocks of which size an engine gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from baton.errors import ConfigError
from baton.model_config import ModelConfig
from engine.cache_plan import plan_cache
from engine.config import EngineConfig
from engine.kv_cache import CacheShape

# 2 (K and V) x 3 layers x 2 heads x 8 elements x 2 bytes = 192 bytes a token.
MODEL = ModelConfig.from_hf(
    LlamaConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=1000, architectures=["LlamaForCausalLM"],
    ).to_dict()
)  # fmt: skip
FREE = 1_000_000


def plan(available: int | None = FREE, **settings: Any) -> CacheShape:
    return plan_cache(EngineConfig(**settings), MODEL, torch.bfloat16, available)


def test_an_automatic_cache_takes_its_share_of_the_free_memory() -> None:
    # A fifth of 1,000,000 bytes is 65 blocks of 16 x 192.
    assert plan(block_size=16) == CacheShape(
        num_blocks=65, num_layers=3, num_kv_heads=2, block_size=16, head_dim=8, dtype=torch.bfloat16
    )
    assert plan(block_size=16, kv_memory_fraction=0.5, layout="NHD").num_blocks == 162


def test_an_automatic_cache_is_no_larger_than_its_use() -> None:
    # 4 sequences of 1000 tokens are 63 blocks each.
    assert plan(available=10**12, block_size=16, max_running=4).num_blocks == 252


def test_a_given_size_is_taken_as_it_is() -> None:
    assert plan(block_size=16, kv_cache_bytes=10**7, max_running=1).num_blocks == 10**7 // 3072
    assert plan(available=None, block_size=16, kv_cache_bytes=10**6).num_blocks == 325


def test_where_free_memory_is_unknown_the_cache_has_a_fixed_size() -> None:
    assert plan(available=None, block_size=16, max_running=255).num_blocks == 255 * 63
    model = dataclasses.replace(MODEL, max_model_len=10**6)
    config = EngineConfig(block_size=16, max_running=255)
    assert plan_cache(config, model, torch.bfloat16, None).num_blocks == (1 << 30) // 3072


def test_the_block_size_follows_the_expected_length_unless_it_is_given() -> None:
    assert plan(kv_cache_bytes=10**7).block_size == 64
    assert plan(kv_cache_bytes=10**7, expected_tokens=1000).block_size == 128
    assert plan(kv_cache_bytes=10**7, expected_tokens=10**6).block_size == 128
    assert plan(kv_cache_bytes=10**7, expected_tokens=64).block_size == 16
    assert plan(kv_cache_bytes=10**7, expected_tokens=64, block_size=5).block_size == 5


def test_nobody_can_expect_more_than_the_model_takes() -> None:
    short = dataclasses.replace(MODEL, max_model_len=130)
    config = EngineConfig(kv_cache_bytes=10**7, expected_tokens=1000)
    assert plan_cache(config, short, torch.bfloat16, FREE).block_size == 32


@pytest.mark.parametrize(
    ("available", "settings", "said"),
    [
        (FREE, {"kv_cache_bytes": 3071}, "is 3071; one block of this model needs 3072 bytes"),
        (FREE, {"kv_cache_bytes": 24575}, "is 24575; a chunk of 128 tokens needs 24576 bytes"),
        (122_879, {}, "0.2 of 122879 free bytes is 24575; a chunk of 128 tokens needs 24576 bytes"),
        (0, {}, "0.2 of 0 free bytes is 0; one block of this model needs 3072 bytes"),
    ],
)
def test_a_cache_that_holds_no_chunk_is_refused(available: int, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        plan(available=available, block_size=16, **settings)
    assert raised.value.field == "kv_cache_bytes"
    assert plan(available=122_881, block_size=16).num_blocks == 8


def test_a_chunk_is_no_longer_than_the_model_takes() -> None:
    short = dataclasses.replace(MODEL, max_model_len=64)
    config = EngineConfig(block_size=16, kv_cache_bytes=4 * 3072)
    assert plan_cache(config, short, torch.bfloat16, FREE).num_blocks == 4
