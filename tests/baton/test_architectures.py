"""What the registry does not name is refused by name, and so is what a named family cannot compute."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from baton.architectures import ARCHITECTURES
from baton.errors import ModelError
from baton.model_config import ModelConfig
from tests.engine.families import CLASSES

Json = dict[str, Any]


def written(config: PreTrainedConfig, architecture: str, **changes: Any) -> Json:
    """What config.json says, once something has been changed in it."""
    content: Json = json.loads(config.to_json_string(use_diff=False))
    return content | {"architectures": [architecture]} | changes


def test_every_architecture_is_proved_against_transformers() -> None:
    assert set(ARCHITECTURES) == {model.__name__ for _, model in CLASSES.values()}


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (GPT2Config(), "GPT2LMHeadModel"),
        (Phi3Config(), "Phi3ForCausalLM"),
        (Gemma3Config(), "Gemma3ForConditionalGeneration"),
        (LlamaConfig(), "LlamaForSequenceClassification"),
        (LlamaConfig(), "llamaforcausallm"),
    ],
)
def test_other_architectures_are_refused_by_name(config: PreTrainedConfig, architecture: str) -> None:
    with pytest.raises(ModelError, match=f"{architecture}, which is not supported") as raised:
        ModelConfig.from_hf(written(config, architecture))

    assert all(name in str(raised.value) for name in ARCHITECTURES)


# Of every model, in numbers that no class has by default.
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 640,
    "num_hidden_layers": 31,
    "num_attention_heads": 32,
    "vocab_size": 300,
    "bos_token_id": 3,
    "eos_token_id": [4, 2],
}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_config_json_leaves_out_is_what_transformers_takes(kind: str) -> None:
    config, model = CLASSES[kind]
    silent = SIZES | {"architectures": [model.__name__]}

    assert ModelConfig.from_hf(silent) == ModelConfig.from_hf(written(config(**SIZES), model.__name__))


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("llama", "num_key_value_heads"),
        ("llama", "head_dim"),
        ("llama", "rope_scaling"),
        ("mistral", "head_dim"),
        ("mistral", "sliding_window"),
        ("ministral", "sliding_window"),
        ("mixtral", "sliding_window"),
        ("qwen2", "num_key_value_heads"),
        ("qwen2", "layer_types"),
        ("qwen3_moe", "mlp_only_layers"),
        ("gemma3", "attn_logit_softcapping"),
    ],
)
def test_a_null_means_what_transformers_takes_it_for(kind: str, key: str) -> None:
    config, model = CLASSES[kind]
    with_null = SIZES | {"architectures": [model.__name__], key: None}
    theirs = written(config(**SIZES, **{key: None}), model.__name__)

    assert ModelConfig.from_hf(with_null) == ModelConfig.from_hf(theirs)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_null_of_anything_else_says_nothing(kind: str) -> None:
    silent = SIZES | {"architectures": [CLASSES[kind][1].__name__]}
    keys = (
        "max_position_embeddings rms_norm_eps hidden_act hidden_activation tie_word_embeddings "
        "attention_bias mlp_bias use_sliding_window max_window_layers layer_types sliding_window_pattern "
        "query_pre_attn_scalar rope_theta rope_scaling rope_parameters rope_local_base_freq "
        "num_local_experts num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
        "mlp_only_layers decoder_sparse_step quantization_config"
    )

    assert ModelConfig.from_hf(silent | dict.fromkeys(keys.split())) == ModelConfig.from_hf(silent)


LLAMA = written(LlamaConfig(), "LlamaForCausalLM")
GEMMA = written(Gemma3TextConfig(), "Gemma3ForCausalLM")
QWEN2 = written(Qwen2Config(use_sliding_window=True), "Qwen2ForCausalLM")
QWEN3_MOE = written(Qwen3MoeConfig(), "Qwen3MoeForCausalLM")


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        (LLAMA, {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope type 'spiral'"),
        (LLAMA, {"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su'"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (GEMMA, {"query_pre_attn_scalar": math.nan}, "query_pre_attn_scalar is nan"),
        (GEMMA, {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (QWEN2, {"layer_types": None, "max_window_layers": "28"}, "max_window_layers is '28'"),
        (QWEN2, {"layer_types": None, "max_window_layers": True}, "max_window_layers is True"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
    ],
)
def test_what_a_family_cannot_compute_is_refused_by_name(config: Json, changes: Json, named: str) -> None:
    ModelConfig.from_hf(config)

    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(config | changes)
