"""What config.json may say of a model, against transformers' configuration classes."""

from __future__ import annotations

import subprocess
import sys
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
from baton.limits import Limits
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
    assert config.eos_token_ids == (7, 9)
    switches = (config.attention_bias, config.output_bias, config.mlp_bias, config.tie_word_embeddings)
    assert switches == (False, False, False, False)


def test_the_minimal_old_config_takes_the_defaults_of_transformers() -> None:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    minimal = {key: LLAMA[key] for key in keys} | {"max_position_embeddings": 512}

    config = ModelConfig.from_hf(minimal | {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2})

    assert (config.num_kv_heads, config.head_dim) == (6, 16)
    assert config.eos_token_ids == (2,)
    assert [rope.theta for rope in config.ropes] == [10000.0]


def test_a_null_in_generation_config_leaves_the_end_of_sequence_to_config() -> None:
    config = ModelConfig.from_hf(LLAMA | {"eos_token_id": 2}, {"eos_token_id": None})
    assert config.eos_token_ids == (2,)


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
        ({"head_dim": "64"}, "head_dim is '64'; it must be a positive integer"),
        ({"head_dim": -64}, "head_dim is -64"),
        (
            {"head_dim": None, "hidden_size": 100},
            "hidden_size 100 is not a multiple of num_attention_heads 6",
        ),
        ({"head_dim": None, "hidden_size": 4}, "hidden_size 4 is not a multiple of num_attention_heads 6"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2'"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads is 2.0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; write a positive number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"attention_bias": "false"}, "attention_bias is 'false'; write true or false"),
        ({"mlp_bias": 1}, "mlp_bias is 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; write true or false"),
        ({"eos_token_id": [2, "3"]}, "config.json: eos_token_id is"),
        ({"eos_token_id": 2.0}, "config.json: eos_token_id is 2.0; write a token id or a list"),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id is '</s>'"),
        ({"eos_token_id": -1}, "config.json: eos_token_id is -1"),
        ({"eos_token_id": [[1]]}, "config.json: eos_token_id is"),
        ({"bos_token_id": True}, "config.json: bos_token_id is True"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; write a list"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(LLAMA | changes)


def test_an_end_of_sequence_that_generation_config_has_wrong_names_that_file() -> None:
    with pytest.raises(ModelError, match=r"^generation_config\.json: eos_token_id is '2'"):
        ModelConfig.from_hf(LLAMA, {"eos_token_id": "2"})


def test_factors_that_do_not_fit_the_heads_are_refused_by_name() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}

    with pytest.raises(ModelError, match="long_factor has 7 numbers; a head of 16 elements needs 8"):
        ModelConfig.from_hf(LLAMA | {"rope_parameters": longrope, "original_max_position_embeddings": 512})


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
    with pytest.raises(ModelError, match=r"mlp_only_layers is \['1'\]"):
        ModelConfig.from_hf(qwen | {"mlp_only_layers": ["1"]})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": 5}, "layer_types must name 2 layers.*it has 1, 5 among them"),
        ({"layer_types": [[1], 2]}, r"layer_types must name 2 layers.*it has 2, \[1\] among them"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_layers_that_cannot_be_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    mixtral = MixtralConfig(architectures=["MixtralForCausalLM"], num_hidden_layers=2).to_dict()

    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(mixtral | changes)


def test_layers_share_what_is_one_rotary_embedding() -> None:
    gemma = Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], num_hidden_layers=2).to_dict()
    same = {"rope_type": "default", "rope_theta": 500.0}
    by_type = {"full_attention": same, "sliding_attention": same}

    config = ModelConfig.from_hf(gemma | {"rope_parameters": by_type})

    assert [rope.theta for rope in config.ropes] == [500.0]
    assert [layer.rope for layer in config.layers] == [0, 0]


def test_the_length_of_gemma_3_is_that_of_its_architecture() -> None:
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 131_072}
    gemma = Gemma3TextConfig(architectures=["Gemma3ForCausalLM"]).to_dict()
    for key in ("model_type", "rope_parameters"):
        del gemma[key]

    assert ModelConfig.from_hf(gemma | scaled).limits.max_model_len == 131_072
    # The same settings stretch a model that has one rotary embedding, whatever else it says of itself.
    llama = LLAMA | {"model_type": "gemma3_text", "rope_parameters": None} | scaled
    assert ModelConfig.from_hf(llama).limits.max_model_len == 1_048_576


def test_the_limits_are_the_models() -> None:
    dynamic = {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}

    config = ModelConfig.from_hf(LLAMA | dynamic)

    assert config.limits == Limits(max_model_len=6144, vocab_size=32000, rope_steps=(2048, 4096, 6144))


def test_it_is_read_without_torch() -> None:
    code = "import sys, baton.models, baton.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
