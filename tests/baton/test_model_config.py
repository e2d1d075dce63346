"""What config.json may say of a model, against transformers' configuration classes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from baton.errors import ModelError
from baton.model_config import ModelConfig, MoeConfig

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
    assert [rope.theta for rope in config.ropes] == [10000.0]


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
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
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


def windows_of(config: PreTrainedConfig, **changes: Any) -> list[int]:
    return [layer.window for layer in ModelConfig.from_hf(config.to_dict() | changes).layers]


def test_which_layers_have_a_window() -> None:
    mistral = MistralConfig(architectures=["MistralForCausalLM"], num_hidden_layers=2, sliding_window=64)
    qwen = {"num_hidden_layers": 4, "sliding_window": 64, "max_window_layers": 1}
    qwen2 = Qwen2Config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, **qwen)
    gemma = Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], num_hidden_layers=7, sliding_window=64)

    assert windows_of(mistral) == [64, 64]
    assert windows_of(mistral, sliding_window=None) == [0, 0]
    assert windows_of(mistral, layer_types=["full_attention", "sliding_attention"]) == [0, 64]
    assert windows_of(qwen2) == windows_of(qwen2, layer_types=None) == [0, 64, 64, 64]
    assert windows_of(qwen2, use_sliding_window=False) == [0, 0, 0, 0]
    assert windows_of(gemma) == windows_of(gemma, layer_types=None) == [64, 64, 64, 64, 64, 0, 64]


def test_layers_with_a_window_have_their_own_rotary_embedding_in_gemma_3() -> None:
    gemma = Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], num_hidden_layers=7)

    config = ModelConfig.from_hf(gemma.to_dict())

    assert [config.ropes[layer.rope].theta for layer in config.layers] == [1e4] * 5 + [1e6, 1e4]
    assert config.attention_scale == 256**-0.5
    assert config.embedding_scale == 2304**0.5
    assert config.activation == "gelu_pytorch_tanh"
    assert config.tie_word_embeddings


def test_which_layers_have_experts() -> None:
    mixtral = MixtralConfig(architectures=["MixtralForCausalLM"], num_hidden_layers=2).to_dict()
    qwen = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=6,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        num_experts=60,
    ).to_dict()

    assert [layer.is_moe for layer in ModelConfig.from_hf(mixtral).layers] == [True, True]
    assert [layer.is_moe for layer in ModelConfig.from_hf(qwen).layers] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert ModelConfig.from_hf(mixtral).moe == MoeConfig(
        num_experts=8, num_chosen=2, intermediate_size=14336, normalizes=True
    )
    assert ModelConfig.from_hf(qwen).moe == MoeConfig(
        num_experts=60, num_chosen=8, intermediate_size=768, normalizes=False
    )


def test_dense_layers_that_are_no_list_are_refused_by_name() -> None:
    qwen = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]).to_dict()

    with pytest.raises(ModelError, match="mlp_only_layers is 3"):
        ModelConfig.from_hf(qwen | {"mlp_only_layers": 3})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_layers_that_cannot_be_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    mixtral = MixtralConfig(architectures=["MixtralForCausalLM"], num_hidden_layers=2).to_dict()

    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(mixtral | changes)
