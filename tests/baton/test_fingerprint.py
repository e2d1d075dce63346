from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

from baton.fingerprint import canonical_attention, canonical_rope, first_difference
from baton.v1.common_pb2 import Fingerprint

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 100000}, {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}),
        ({}, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        ({"rope_scaling": None}, {"rope_theta": 10000}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", **LLAMA3}},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        ),
    ],
    ids=["theta", "defaults", "null_scaling", "llama3", "linear_by_old_name", "partial"],
)
def test_both_spellings_of_a_rotary_embedding_agree(old, new):
    assert canonical_rope(old) == canonical_rope(new)


def test_the_spelling_transformers_writes_agrees_with_the_old_one():
    old = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    written = json.loads(LlamaConfig(max_position_embeddings=131072, **old).to_json_string())
    assert "rope_scaling" not in written
    assert canonical_rope(written) == canonical_rope(old)


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 10001},
        {"rope_local_base_freq": 10000},
        {"rope_scaling": {"rope_type": "linear", "factor": 1.0}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_different_rotary_embeddings_differ(other):
    assert canonical_rope(other) != canonical_rope({"rope_theta": 10000})


def test_both_spellings_of_two_rotary_embeddings_agree():
    old = {"rope_theta": 1e6, "rope_local_base_freq": 10000, "rope_scaling": {"type": "linear", "factor": 8}}
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    assert canonical_rope(old) == canonical_rope({"rope_parameters": by_type})
    assert set(json.loads(canonical_rope(old))) == {"full_attention", "sliding_attention"}


MASKED = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096, "sliding_window": 512}


def test_attention_is_what_decides_who_sees_whom():
    given = MASKED | {"layer_types": None, "hidden_size": 64, "rms_norm_eps": 1e-6}
    assert json.loads(canonical_attention(given)) == MASKED
    assert canonical_attention(dict(reversed(given.items()))) == canonical_attention(given)
    assert canonical_attention({}) == "{}"


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"max_position_embeddings": 8192},
        {"sliding_window": 511},
        {"sliding_window": None},
        {"use_sliding_window": False},
        {"max_window_layers": 3},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"sliding_window_pattern": 6},
    ],
    ids=str,
)
def test_other_masks_differ(changes):
    assert canonical_attention(MASKED | changes) != canonical_attention(MASKED)


def fingerprint(**changes: object) -> Fingerprint:
    fields = {
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
    }
    return Fingerprint(**{**fields, **changes})


def test_equal_fingerprints_have_no_difference():
    assert first_difference(fingerprint(), fingerprint()) is None


@pytest.mark.parametrize("name", [field.name for field in Fingerprint.DESCRIPTOR.fields])
def test_each_differing_field_is_named(name):
    value = "other" if isinstance(getattr(fingerprint(), name), str) else 99
    assert first_difference(fingerprint(), fingerprint(**{name: value})) == name


def test_the_first_of_several_differences_is_named():
    assert first_difference(fingerprint(), fingerprint(rope="x", num_heads=4)) == "num_heads"
