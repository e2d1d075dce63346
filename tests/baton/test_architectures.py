"""What the registry does not name is refused by name, and so is what a named family cannot compute."""

from __future__ import annotations

import json
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

from baton.errors import ModelError
from baton.model_config import ModelConfig
from baton.architectures import ARCHITECTURES
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
        (GEMMA, {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (QWEN2, {"layer_types": None, "max_window_layers": None}, "max_window_layers is None"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
    ],
)
def test_what_a_family_cannot_compute_is_refused_by_name(config: Json, changes: Json, named: str) -> None:
    ModelConfig.from_hf(config)

    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(config | changes)
