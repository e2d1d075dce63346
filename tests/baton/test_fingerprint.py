"""One model has one fingerprint, however its config.json spells it; another model is told by a field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from baton.fingerprint import canonical_attention, canonical_mlp, canonical_rope, first_difference
from baton.model_config import ModelConfig
from baton.v1.common_pb2 import Fingerprint

Json = dict[str, Any]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
}
FIELDS = {
    "weights_id": "w",
    "tokenizer_id": "t",
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "rope": "{}",
    "sampler_version": 1,
    "key_version": 1,
    "attention": "{}",
    "mlp": "{}",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA_TYPES = {
    "full_attention": LINEAR | {"rope_theta": 1000000},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
}


def fingerprint(family: str, **settings: Any) -> Fingerprint:
    """What a process that reads this config.json shows of itself, over equal files."""
    model = ModelConfig.from_hf({"architectures": [f"{family}ForCausalLM"]} | SIZES | settings)
    read = {
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "rope": canonical_rope(model),
        "attention": canonical_attention(model),
        "mlp": canonical_mlp(model),
    }
    return Fingerprint(**(FIELDS | read))


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("Llama", {"rope_theta": 1e5}, {"rope_parameters": {"rope_theta": 100000, "rope_type": "default"}}),
        ("Llama", {}, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        ("Llama", {"rope_scaling": None}, {"rope_theta": 10000}),
        ("Llama", {"partial_rotary_factor": 1}, {}),
        ("Llama", {}, {"model_type": "llama", "torch_dtype": "bfloat16", "use_cache": True}),
        (
            "Llama",
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", **LLAMA3}},
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8192}},
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_theta": 500.0}},
            {"rope_parameters": {"full_attention": {"rope_theta": 500}, "sliding_attention": {}}},
        ),
        ("Llama", {"num_key_value_heads": None}, {"num_key_value_heads": 2}),
        ("Llama", {"max_position_embeddings": None}, {"max_position_embeddings": 2048}),
        ("Mistral", {}, {"sliding_window": 4096}),
        ("Mistral", {"head_dim": None}, {"head_dim": 32}),
        ("Mixtral", {}, {"rope_theta": 1e6}),
        ("Mixtral", {}, {"sliding_window": None}),
        ("Gemma3", {}, {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}),
        ("Gemma3", {}, {"model_type": "gemma3_text", "sliding_window_pattern": 6}),
        ("Gemma3", {}, {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}),
        ("Gemma3", {"rope_scaling": LINEAR}, {"rope_parameters": GEMMA_TYPES}),
        ("Gemma3", {}, {"query_pre_attn_scalar": 256}),
        ("Qwen2", {}, {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 2}),
        (
            "Qwen2",
            {"use_sliding_window": True, "max_window_layers": 5},
            {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
            },
        ),
    ],
)
def test_the_same_model_is_the_same_in_every_spelling(family: str, one: Json, other: Json) -> None:
    assert first_difference(fingerprint(family, **one), fingerprint(family, **other)) is None


@pytest.mark.parametrize(
    ("family", "one", "other", "field"),
    [
        ("Llama", {"rope_theta": 10001}, {}, "rope"),
        ("Llama", {"rope_scaling": LINEAR}, {}, "rope"),
        ("Llama", {"rope_scaling": LINEAR}, {"rope_scaling": LINEAR | {"factor": 4.0}}, "rope"),
        ("Mixtral", {}, {"rope_theta": 10000.0}, "rope"),
        ("Gemma3", {}, {"rope_theta": 10000.0}, "rope"),
        ("Gemma3", {}, {"rope_local_base_freq": 20000.0}, "rope"),
        ("Llama", {}, {"max_position_embeddings": 4096}, "attention"),
        ("Mistral", {}, {"sliding_window": None}, "attention"),
        ("Mistral", {}, {"sliding_window": 4095}, "attention"),
        ("Gemma3", {}, {"sliding_window_pattern": 3}, "attention"),
        ("Gemma3", {}, {"query_pre_attn_scalar": 128}, "attention"),
        (
            "Qwen2",
            {"use_sliding_window": True},
            {"use_sliding_window": True, "max_window_layers": 3},
            "attention",
        ),
        (
            "Qwen3Moe",
            {"use_sliding_window": True},
            {"use_sliding_window": True, "sliding_window": None},
            "attention",
        ),
        ("Llama", {"num_key_value_heads": None}, {}, "num_kv_heads"),
        ("Llama", {"head_dim": None, "hidden_size": 128}, {}, "head_dim"),
    ],
)
def test_another_model_is_told_by_a_field(family: str, one: Json, other: Json, field: str) -> None:
    assert first_difference(fingerprint(family, **one), fingerprint(family, **other)) == field


def test_another_architecture_is_told_by_its_attention() -> None:
    mistral = fingerprint("Mistral", sliding_window=None)
    assert first_difference(fingerprint("Llama"), mistral) == "attention"


def test_lengths_at_which_the_scale_changes_are_part_of_the_embedding() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    # Both are stretched to 16,384 tokens; their first scales serve 8,192 and 4,096.
    one = fingerprint("Llama", rope_scaling=dynamic)
    other = fingerprint("Llama", rope_scaling=dynamic | {"factor": 4.0}, max_position_embeddings=4096)
    assert json.loads(one.rope)["steps"] == [8192, 16384]
    assert json.loads(other.rope)["steps"] == [4096, 8192, 16384]
    assert first_difference(one, other) == "rope"


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", LlamaConfig(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}, **SIZES)),
        ("Gemma3", Gemma3TextConfig(rope_scaling=dict(LINEAR), **SIZES)),
    ],
)
def test_the_spelling_transformers_writes_agrees_with_the_old_one(family: str, config: LlamaConfig) -> None:
    written = json.loads(config.to_json_string())
    assert "rope_scaling" not in written
    scaled = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    old = {"rope_scaling": LINEAR} if family == "Gemma3" else scaled
    ours = {"architectures": [f"{family}ForCausalLM"]}
    assert first_difference(fingerprint(family, **(written | ours)), fingerprint(family, **old)) is None


def test_each_layer_says_what_it_sees_and_how_it_is_rotated() -> None:
    gemma = fingerprint("Gemma3", sliding_window=512)
    assert json.loads(gemma.attention) == {
        "architecture": "Gemma3ForCausalLM",
        "max_model_len": 8192,
        "ropes": [0, 0, 0, 0, 0, 1],
        "scale": 0.0625,
        "windows": [512, 512, 512, 512, 512, 0],
    }
    assert [rope["theta"] for rope in json.loads(gemma.rope)["embeddings"]] == [10000.0, 1000000.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-4},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": True},
        {"mlp_only_layers": [0]},
    ],
)
def test_what_is_computed_behind_attention_counts(changes: Json) -> None:
    ours, theirs = fingerprint("Qwen3Moe"), fingerprint("Qwen3Moe", **changes)
    assert first_difference(ours, theirs) == "mlp"


def test_every_number_of_a_rotary_embedding_counts() -> None:
    longrope = {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "attention_factor": 1.5,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    changes: list[tuple[Json, Json]] = [
        (longrope, {"short_factor": [1.0] * 15 + [1.5]}),
        (longrope, {"long_factor": [2.0] * 15 + [2.5]}),
        (longrope, {"attention_factor": 1.25}),
        (longrope, {"original_max_position_embeddings": 1024}),
        (yarn, {"beta_fast": 16}),
        (yarn, {"beta_slow": 2}),
        (yarn, {"truncate": False}),
        (yarn, {"mscale": 1.0, "mscale_all_dim": 0.5}),
        ({"rope_type": "llama3", **LLAMA3}, {"low_freq_factor": 2.0}),
        ({"rope_type": "llama3", **LLAMA3}, {"high_freq_factor": 8.0}),
    ]
    for rope, change in changes:
        one, other = fingerprint("Llama", rope_scaling=rope), fingerprint("Llama", rope_scaling=rope | change)
        assert first_difference(one, other) == "rope", change


def test_equal_fingerprints_have_no_difference() -> None:
    assert first_difference(Fingerprint(**FIELDS), Fingerprint(**FIELDS)) is None


@pytest.mark.parametrize("name", [field.name for field in Fingerprint.DESCRIPTOR.fields])
def test_each_differing_field_is_named(name: str) -> None:
    value = "other" if isinstance(FIELDS[name], str) else 99
    assert first_difference(Fingerprint(**FIELDS), Fingerprint(**(FIELDS | {name: value}))) == name


def test_the_first_of_several_differences_is_named() -> None:
    other = FIELDS | {"rope": "x", "num_heads": 4}
    assert first_difference(Fingerprint(**FIELDS), Fingerprint(**other)) == "num_heads"
