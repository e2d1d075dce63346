from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from baton import digests
from baton.errors import ModelError
from baton.limits import Limits
from baton.manifest import Manifest
from baton.model_config import ModelConfig
from baton.models import ModelDir

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))


def safetensors_bytes(data: bytes, tensor: str = "of model.safetensors") -> bytes:
    """One tensor of raw bytes, laid out by hand from the format's description."""
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({tensor: entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


def make_folder(folder: Path, weights: dict[str, bytes] | None = None, **changes: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    for name, data in (weights or {"model.safetensors": b"weights"}).items():
        (folder / name).write_bytes(safetensors_bytes(data, f"of {name}"))
    return folder


def write_index(folder: Path, *names: str) -> None:
    weight_map = {f"of {name}": name for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_folder_opens_by_path_and_a_pulled_model_by_name(tmp_path):
    folder = make_folder(tmp_path / "cache" / "models" / "small")
    assert ModelDir.open(folder).path == folder
    assert ModelDir.open(str(folder)).path == folder
    assert ModelDir.open("small").path == folder
    assert ModelDir.open("small").name == "small"


def test_a_hub_repository_opens_by_its_name(tmp_path):
    folder = make_folder(tmp_path / "cache" / "models" / "org--small")
    assert ModelDir.open("org/small").path == folder


def test_what_a_model_says_about_itself(tmp_path):
    model = ModelDir.open(make_folder(tmp_path / "m"))
    assert model.eos_token_ids == (2,)
    assert model.bos_token_id == 1
    assert model.limits == Limits(max_model_len=256, vocab_size=300)
    assert model.weights_files == (tmp_path / "m" / "model.safetensors",)
    assert model.chat_template is None


def test_the_length_and_its_steps_follow_from_the_rotary_embedding(tmp_path):
    dynamic = {"rope_type": "dynamic", "factor": 3.0}
    model = ModelDir.open(make_folder(tmp_path / "m", rope_scaling=dynamic))
    assert model.limits == Limits(max_model_len=768, vocab_size=300, rope_steps=(256, 512, 768))
    assert model.max_model_len == 768


def test_generation_config_overrides_the_end_of_sequence_ids(tmp_path):
    folder = make_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = ModelDir.open(folder)
    assert model.eos_token_ids == (7, 9)
    assert model.bos_token_id == 1


def test_a_model_may_have_no_special_ids(tmp_path):
    model = ModelDir.open(make_folder(tmp_path / "m", eos_token_id=None, bos_token_id=None))
    assert model.eos_token_ids == ()
    assert model.bos_token_id is None


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("A", "A"),
        ([{"name": "tool_use", "template": "B"}, {"name": "default", "template": "C"}], "C"),
        (None, None),
    ],
    ids=["one", "several", "none"],
)
def test_chat_template_of_tokenizer_config(tmp_path, template, expected):
    folder = make_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert ModelDir.open(folder).chat_template == expected


def test_a_template_for_tools_beside_the_other(tmp_path):
    folder = make_folder(tmp_path / "m")
    assert ModelDir.open(folder).tool_template is None
    named = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "C"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ModelDir.open(folder).tool_template == "B"


def test_chat_template_file_wins(tmp_path):
    folder = make_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (folder / "chat_template.jinja").write_text("new")
    assert ModelDir.open(folder).chat_template == "new"


def test_a_missing_folder_names_the_command_that_brings_it():
    with pytest.raises(
        ModelError,
        match=r"no model folder nowhere; run: baton pull NAME, where NAME is smollm2-135m-instruct",
    ):
        ModelDir.open("nowhere")


@pytest.mark.parametrize("path", ["/no/such", "./such", "../such", "~/no-such-folder", "a/b/c"])
def test_a_path_that_does_not_exist_cannot_be_pulled(path):
    with pytest.raises(ModelError, match=r"there is no model folder .*; give the path of one that exists$"):
        ModelDir.open(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named_with_its_remedy(tmp_path, name):
    folder = make_folder(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(ModelError, match=rf"lacks {name}.*baton pull"):
        ModelDir.open(folder)


def test_exactly_the_shards_of_the_index_are_used(tmp_path):
    shards = {"b-2.safetensors": b"two", "a-1.safetensors": b"one", "stale-3.safetensors": b"stale"}
    folder = make_folder(tmp_path / "m", shards)
    write_index(folder, "b-2.safetensors", "a-1.safetensors")
    model = ModelDir.open(folder)
    assert [path.name for path in model.weights_files] == ["a-1.safetensors", "b-2.safetensors"]


def test_a_missing_shard_is_named(tmp_path):
    folder = make_folder(tmp_path / "m", {"a-1.safetensors": b"one"})
    write_index(folder, "a-1.safetensors", "b-2.safetensors")
    with pytest.raises(ModelError, match=r"lacks b-2\.safetensors"):
        ModelDir.open(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "weights.bin", 7])
def test_an_index_cannot_name_files_elsewhere(tmp_path, name):
    folder = make_folder(tmp_path / "m", {"a-1.safetensors": b"one"})
    write_index(folder, "a-1.safetensors", name) if isinstance(name, str) else write_index(folder, name)
    with pytest.raises(ModelError, match="not a safetensors file of this folder"):
        ModelDir.open(folder)


@pytest.mark.parametrize("change", [-1, -8, 1], ids=["one_short", "eight_short", "one_long"])
def test_a_file_of_the_wrong_length_is_refused(tmp_path, change):
    folder = make_folder(tmp_path / "m", {"model.safetensors": bytes(100)})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:change] if change < 0 else whole + b"x")
    with pytest.raises(ModelError, match=rf"has {len(whole) + change} bytes .* asks for {len(whole)}"):
        ModelDir.open(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 9) + b"not json!"],
    ids=["empty", "half_a_length", "huge_length", "not_json"],
)
def test_a_damaged_header_is_refused(tmp_path, content):
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors .*pull the model again"):
        ModelDir.open(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused(tmp_path, name):
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=rf"only as {name}; Baton reads safetensors alone"):
        ModelDir.open(folder)


@pytest.mark.parametrize("value", [None, 0, -1, "300", True])
def test_a_bad_count_names_the_key(tmp_path, value):
    with pytest.raises(ModelError, match=rf"/m/config\.json: vocab_size is {value!r}"):
        ModelDir.open(make_folder(tmp_path / "m", vocab_size=value))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel, which is not supported"),
        ({"architectures": None}, "no architecture"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0}}, "rope parameter factor is 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_a_model_that_is_not_supported_does_not_open(tmp_path, changes, named):
    with pytest.raises(ModelError, match=rf"^{tmp_path}/m/config\.json.* {named}"):
        ModelDir.open(make_folder(tmp_path / "m", **changes))


def test_a_silent_config_has_the_length_of_its_architecture(tmp_path):
    folder = make_folder(tmp_path / "m", max_position_embeddings=None)
    # LlamaConfig's.
    assert ModelDir.open(folder).limits.max_model_len == 2048


def test_config_json_is_read_once(tmp_path, monkeypatch):
    model = ModelDir.open(make_folder(tmp_path / "m"))
    monkeypatch.setattr(ModelConfig, "from_hf", lambda *_: pytest.fail("read again"))
    assert model.limits.max_model_len == model.max_model_len == 256
    assert model.fingerprint().num_layers == 2


def test_a_changed_copy_is_read_anew(tmp_path):
    model = ModelDir.open(make_folder(tmp_path / "m"))
    changed = replace(model, config=model.config | {"max_position_embeddings": 128})
    assert (changed.max_model_len, model.max_model_len) == (128, 256)


def test_weights_id_is_the_digest_of_the_files_in_order(tmp_path):
    folder = make_folder(tmp_path / "m", {"b.safetensors": b"two", "a.safetensors": b"one"})
    write_index(folder, "a.safetensors", "b.safetensors")
    first, second = (
        safetensors_bytes(data, f"of {name}.safetensors") for data, name in ((b"one", "a"), (b"two", "b"))
    )
    assert ModelDir.open(folder).weights_id == hashlib.sha256(first + second).hexdigest()


def test_weights_id_is_computed_once(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "m")
    first = ModelDir.open(folder).weights_id
    monkeypatch.setattr(digests, "sha256_of", lambda paths: pytest.fail("read again"))
    assert ModelDir.open(folder).weights_id == first


def test_replaced_weights_of_the_same_size_are_read_again(tmp_path):
    folder = make_folder(tmp_path / "m", {"model.safetensors": b"aaaa"})
    before = ModelDir.open(folder).weights_id
    path = folder / "model.safetensors"
    modified_ns = path.stat().st_mtime_ns
    path.write_bytes(safetensors_bytes(b"bbbb"))
    os.utime(path, ns=(modified_ns, modified_ns + 1))
    assert ModelDir.open(folder).weights_id != before


def test_weights_id_needs_no_writable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    model = ModelDir.open(make_folder(tmp_path / "m"))
    assert model.weights_id == hashlib.sha256(safetensors_bytes(b"weights")).hexdigest()


def manifest(folder: Path, size: int) -> None:
    Manifest(
        weights_id="recorded",
        source="",
        license="",
        conversion_version=0,
        weights_sizes={"model.safetensors": size},
    ).write(folder)


def test_the_recorded_weights_id_counts_while_sizes_agree(tmp_path):
    folder = make_folder(tmp_path / "m")
    manifest(folder, len(safetensors_bytes(b"weights")))
    assert ModelDir.open(folder).weights_id == "recorded"


def test_a_contradicted_record_is_not_believed(tmp_path):
    folder = make_folder(tmp_path / "m")
    manifest(folder, 1)
    assert ModelDir.open(folder).weights_id == hashlib.sha256(safetensors_bytes(b"weights")).hexdigest()


@pytest.mark.parametrize("content", ["", "[]", '{"weights_id": "x"}', '{"unknown": 1}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    folder = make_folder(tmp_path / "m")
    (folder / "baton.json").write_text(content)
    with pytest.raises(ModelError, match=r"baton\.json is damaged"):
        ModelDir.open(folder)


def test_fingerprint_takes_its_numbers_from_the_configuration(tmp_path):
    fingerprint = ModelDir.open(make_folder(tmp_path / "m")).fingerprint()
    assert fingerprint.num_layers == 2
    assert (fingerprint.num_heads, fingerprint.num_kv_heads, fingerprint.head_dim) == (8, 2, 8)
    assert fingerprint.vocab_size == 300
    assert fingerprint.tokenizer_id == hashlib.sha256(b"{}").hexdigest()
    assert [rope["theta"] for rope in json.loads(fingerprint.rope)["embeddings"]] == [10000.0]
    assert json.loads(fingerprint.attention)["max_model_len"] == 256


def test_explicit_head_dim_wins_and_kv_heads_default_to_heads(tmp_path):
    folder = make_folder(tmp_path / "m", head_dim=32, num_key_value_heads=None)
    fingerprint = ModelDir.open(folder).fingerprint()
    assert (fingerprint.head_dim, fingerprint.num_kv_heads) == (32, 8)
