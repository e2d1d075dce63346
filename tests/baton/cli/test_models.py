from __future__ import annotations

import json

import pytest
import typer

from baton.cli.models import parse_size, shown_size
from tests import bare_model

CONFIG = json.loads(bare_model.TEXT)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A model of 10 bytes of weights, one that cannot be used, and a pull under way."""
    models = tmp_path / "models"
    for name in ("org--small", "broken", ".partial"):
        (models / name).mkdir(parents=True)
    folder = models / "org--small"
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": "float16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    return folder


def kv_bytes_per_token() -> int:
    """Keys and values of every layer, two bytes each."""
    heads = CONFIG.get("num_key_value_heads", CONFIG["num_attention_heads"])
    head_dim = CONFIG.get("head_dim") or CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    return 2 * CONFIG["num_hidden_layers"] * heads * head_dim * 2


def test_what_there_is_and_what_fits(baton, shelf) -> None:
    length = CONFIG["max_position_embeddings"]
    exact = 10 + length * kv_bytes_per_token()
    for memory, fits, tokens in ((exact, True, length), (exact - 1, False, length - 1), (9, False, 0)):
        found = json.loads(baton("models", "--json", "--memory", str(memory)).out)
        broken, small = found["models"]
        assert found["memory_bytes"] == memory
        assert (small["name"], small["path"]) == ("org/small", str(shelf))
        assert (small["architecture"], small["dtype"]) == (CONFIG["architectures"][0], "float16")
        assert (small["weights_bytes"], small["max_model_len"]) == (10, length)
        assert (small["kv_bytes_per_token"], small["kv_tokens"]) == (kv_bytes_per_token(), tokens)
        assert small["fits"] is fits
        assert broken["name"] == "broken"
        assert "lacks config.json" in broken["problem"]


def test_the_table_says_what_cannot_be_used(baton, shelf) -> None:
    ran = baton("models", "--memory", "1TiB")
    assert ran.code == 0
    assert "org/small" in ran.out
    assert "note: broken cannot be used" in ran.out
    assert ".partial" not in ran.out
    assert "smollm2-135m-instruct" in ran.err


def test_an_empty_shelf_is_no_failure(baton, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    ran = baton("models")
    assert (ran.code, ran.out) == (0, "")
    assert "no model in" in ran.err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 << 30),
        ("24 GB", 24_000_000_000),
        ("1000", 1000),
        ("1.5g", 1_500_000_000),
        ("2 MiB", 2 << 20),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "5 XB", "5GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (22 << 10, "22 KiB"), (80 << 30, "80 GiB")],
)
def test_sizes_are_shown(size: int, text: str) -> None:
    assert shown_size(size) == text
