"""One tiny random transformers model per family and switch, and how older checkpoints spell the same.

Nothing is a power of two, every norm and bias is random, and windows and rope thetas are so
small that they decide within a few tokens. What a family is known for therefore shows in its
logits; tests/engine/model/test_families_oracle.py proves that it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.tiny_models import AWKWARD, randomize

Json = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
CLASSES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model to make.

    kind: a key of CLASSES.
    settings: of its config, over AWKWARD; those named in `unset` are left to transformers' defaults.
    shard_size: how long its files may be.
    seed: chosen such that transformers' greedy tokens are never a near tie.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    shard_size: str = "1GB"
    seed: int = 1

    def config(self, **overrides: Any) -> PretrainedConfig:
        """transformers' config."""
        settings = AWKWARD | {"initializer_range": 0.2, "pad_token_id": None} | dict(self.settings)
        kept = {key: value for key, value in settings.items() if key not in self.unset}
        return CLASSES[self.kind][0](**(kept | overrides))

    def make(self) -> PreTrainedModel:
        """transformers' model."""
        torch.manual_seed(self.seed)
        model = CLASSES[self.kind][1](self.config()).eval()
        randomize(model)
        return model

    def save(self, folder: Path) -> PreTrainedModel:
        """Writes the checkpoint as transformers writes it, and returns the model."""
        model = self.make()
        model.save_pretrained(folder, max_shard_size=self.shard_size)
        (folder / "tokenizer.json").write_text("{}")
        return model


def rope(**parameters: Any) -> Json:
    return {"rope_parameters": {"rope_theta": 500.0} | parameters}


UNTIED = {"tie_word_embeddings": False}
# AWKWARD's three heads in another size; the first of each kind has it.
HEAD_DIM_80 = {"head_dim": 80}
# The same for families whose config.json does not say it; smaller weights, for as large logits.
HIDDEN_240 = {"hidden_size": 240, "initializer_range": 0.1}
LLAMA3 = rope(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=40)
GEMMA_ROPES = {
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    }
}
# Smaller weights: the embedding is scaled up, and at a tied head every answer would repeat its last token.
GEMMA = {
    "initializer_range": 0.05,
    "sliding_window": 8,
    "layer_types": [SLIDING, SLIDING, FULL],
    "query_pre_attn_scalar": 33,
} | GEMMA_ROPES
QWEN3_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}

FAMILIES: dict[str, Family] = {
    "llama tied": Family(kind="llama", settings=HEAD_DIM_80),
    "llama untied, 4 heads on 2": Family(
        kind="llama",
        settings=UNTIED
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 26, "hidden_size": 52},
    ),
    "llama biases, every head its own": Family(
        kind="llama", settings={"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}
    ),
    "llama3 rope, three shards": Family(kind="llama", settings=UNTIED | LLAMA3, shard_size="130KB"),
    "llama yarn rope, head_dim 80": Family(kind="llama", settings=YARN | {"head_dim": 80}),
    "llama linear rope": Family(kind="llama", settings=rope(rope_type="linear", factor=4.0)),
    "mistral window": Family(kind="mistral", settings=UNTIED | HEAD_DIM_80 | {"sliding_window": 8}),
    "mistral null window": Family(kind="mistral", settings={"sliding_window": None, "head_dim": 28}),
    "ministral window by layer": Family(
        kind="ministral",
        settings=HEAD_DIM_80 | {"sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen2": Family(kind="qwen2", settings=HIDDEN_240, unset=("head_dim",)),
    "qwen2 window from layer 1": Family(
        kind="qwen2",
        settings=UNTIED
        | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "head_dim": 28},
    ),
    "qwen3 head_dim 80 of hidden 60": Family(kind="qwen3", settings=UNTIED | HEAD_DIM_80),
    "qwen3 window by layer, biases": Family(
        kind="qwen3",
        settings={
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": [FULL, SLIDING, FULL],
            "attention_bias": True,
        },
    ),
    "gemma3": Family(kind="gemma3", settings=GEMMA | HEAD_DIM_80),
    "gemma3 untied, biases": Family(
        kind="gemma3",
        settings=GEMMA
        | UNTIED
        | {
            "attention_bias": True,
            "initializer_range": 0.3,
            "head_dim": 28,
            "layer_types": [FULL, SLIDING, FULL],
        },
    ),
    "mixtral": Family(
        kind="mixtral", settings=UNTIED | HIDDEN_240 | {"num_local_experts": 3}, unset=("head_dim",)
    ),
    "mixtral window": Family(
        kind="mixtral", settings={"num_local_experts": 5, "sliding_window": 8, "head_dim": 28}
    ),
    "qwen3 moe, dense middle": Family(
        kind="qwen3_moe",
        settings=QWEN3_MOE | UNTIED | HIDDEN_240 | {"mlp_only_layers": [1], "norm_topk_prob": True},
        unset=("head_dim",),
    ),
    "qwen3 moe, every second sparse, window": Family(
        kind="qwen3_moe",
        settings=QWEN3_MOE
        | {
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
        },
    ),
}

# The first of each kind, by name: what is run where a case per switch would cost too much.
ARCHITECTURES: dict[str, str] = {
    kind: next(name for name, family in FAMILIES.items() if family.kind == kind) for kind in CLASSES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """An older config.json: a model, and what such a file says instead of what transformers writes now."""

    family: Family
    respell: Callable[[Json], object]

    def write(self, folder: Path) -> None:
        """Rewrites a saved folder's config.json."""
        path = folder / "config.json"
        config = json.loads(path.read_text())
        self.respell(config)
        path.write_text(json.dumps(config))


def without(*keys: str) -> Callable[[Json], object]:
    """A config.json that leaves these to the family's defaults."""

    def respell(config: Json) -> None:
        for key in keys:
            del config[key]

    return respell


def old_rope(config: Json) -> None:
    """`rope_theta` and `rope_scaling` of the whole model."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters


def oldest_rope(config: Json) -> None:
    """The rope type was `type` once."""
    old_rope(config)
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")


def old_gemma(config: Json) -> None:
    """Two thetas of the whole model, and a window for all layers but every third."""
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes[FULL].pop("rope_theta")
    config["rope_local_base_freq"] = ropes[SLIDING]["rope_theta"]
    config["rope_scaling"] = ropes[FULL]
    del config["layer_types"], config["_sliding_window_pattern"]
    config["sliding_window_pattern"] = 3


def old_qwen2(config: Json) -> None:
    """The window's size without layer types; it is switched off."""
    del config["layer_types"]
    old_rope(config)
    config |= {"sliding_window": 4, "max_window_layers": 1, "rope_scaling": None}


def num_experts_by_its_own_name(config: Json) -> None:
    config["num_experts"] = config.pop("num_local_experts")


PLAIN = UNTIED | {"rms_norm_eps": 1e-6}
_COMMON = ("tie_word_embeddings", "rms_norm_eps", "rope_parameters")
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 80, "head_dim": 10}

SPELLINGS: dict[str, Spelling] = {
    "llama3 rope_scaling": Spelling(family=FAMILIES["llama3 rope, three shards"], respell=old_rope),
    "yarn rope_scaling": Spelling(family=FAMILIES["llama yarn rope, head_dim 80"], respell=old_rope),
    "linear rope_scaling by type": Spelling(family=FAMILIES["llama linear rope"], respell=oldest_rope),
    "llama defaults": Spelling(
        family=Family(kind="llama", settings=PLAIN | {"num_key_value_heads": 3}),
        respell=without(
            *_COMMON, "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "hidden_act"
        ),
    ),
    "mistral defaults": Spelling(
        family=Family(kind="mistral", settings=PLAIN | EIGHT_HEADS | {"sliding_window": 4096}),
        respell=without(*_COMMON, "num_key_value_heads", "head_dim", "sliding_window"),
    ),
    "ministral without layer types": Spelling(
        family=Family(kind="ministral", settings={"sliding_window": 7}), respell=without("layer_types")
    ),
    "qwen2 max_window_layers": Spelling(
        family=FAMILIES["qwen2 window from layer 1"], respell=without("layer_types")
    ),
    "qwen2 window of no use": Spelling(family=FAMILIES["qwen2"], respell=old_qwen2),
    "qwen2 defaults": Spelling(
        family=Family(kind="qwen2", settings=PLAIN),
        respell=without(*_COMMON, "use_sliding_window", "sliding_window", "layer_types"),
    ),
    "qwen3 defaults": Spelling(
        family=Family(kind="qwen3", settings=PLAIN | {"head_dim": 128}),
        respell=without(*_COMMON, "head_dim", "attention_bias", "layer_types"),
    ),
    "gemma3 thetas and pattern": Spelling(family=FAMILIES["gemma3"], respell=old_gemma),
    "gemma3 defaults": Spelling(
        family=Family(
            kind="gemma3",
            settings={
                "rms_norm_eps": 1e-6,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "num_hidden_layers": 7,
            },
        ),
        respell=without(
            *_COMMON,
            "num_key_value_heads",
            "head_dim",
            "hidden_activation",
            "query_pre_attn_scalar",
            "sliding_window",
            "layer_types",
            "_sliding_window_pattern",
        ),
    ),
    "mixtral defaults": Spelling(
        family=Family(
            kind="mixtral",
            settings=UNTIED | EIGHT_HEADS | {"rms_norm_eps": 1e-5, "num_local_experts": 8},
            unset=("head_dim",),
        ),
        respell=without(
            *_COMMON, "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "sliding_window"
        ),
    ),
    "qwen3 moe defaults": Spelling(
        family=Family(
            kind="qwen3_moe",
            settings=PLAIN
            | QWEN3_MOE
            | {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "num_experts_per_tok": 8,
                "num_experts": 9,
            },
        ),
        respell=without(
            *_COMMON,
            "num_key_value_heads",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
            "num_experts_per_tok",
            "sliding_window",
        ),
    ),
    "qwen3 moe num_experts": Spelling(
        family=FAMILIES["qwen3 moe, dense middle"], respell=num_experts_by_its_own_name
    ),
}
