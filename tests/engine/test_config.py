"""What config.json may say, and which settings an engine takes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from baton.errors import ConfigError, ModelError
from engine.config import EngineConfig, ModelConfig

LLAMA = LlamaConfig(
    hidden_size=96, num_attention_heads=6, num_key_value_heads=2, architectures=["LlamaForCausalLM"]
).to_dict()


def test_a_llama_config_is_read() -> None:
    config = ModelConfig.from_hf(LLAMA, {"eos_token_id": [7, 9]})

    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 16)
    assert (config.num_layers, config.intermediate_size, config.vocab_size) == (32, 11008, 32000)
    assert config.max_model_len == 2048
    assert config.rms_norm_eps == 1e-6
    assert config.eos_token_ids == {7, 9}
    switches = (config.attention_bias, config.output_bias, config.mlp_bias, config.tie_word_embeddings)
    assert switches == (False, False, False, False)


def test_the_minimal_old_config_takes_the_defaults_of_transformers() -> None:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    minimal = {key: LLAMA[key] for key in keys} | {"max_position_embeddings": 512}

    config = ModelConfig.from_hf(minimal | {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2})

    assert (config.num_kv_heads, config.head_dim) == (6, 16)
    assert config.eos_token_ids == {2}
    assert config.rope.theta == 10000.0


def test_a_null_in_generation_config_leaves_the_end_of_sequence_to_config() -> None:
    config = ModelConfig.from_hf(LLAMA | {"eos_token_id": 2}, {"eos_token_id": None})
    assert config.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None}, "no architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(LLAMA | changes)


def test_switches_that_an_architecture_implies() -> None:
    qwen = Qwen2Config(architectures=["Qwen2ForCausalLM"]).to_dict()
    mistral = MistralConfig(architectures=["MistralForCausalLM"], sliding_window=None).to_dict()

    assert ModelConfig.from_hf(qwen).attention_bias
    assert not ModelConfig.from_hf(qwen).output_bias
    assert not ModelConfig.from_hf(mistral).attention_bias
    assert ModelConfig.from_hf(LLAMA | {"attention_bias": True}).output_bias


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
