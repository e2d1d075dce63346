"""Which way of writing calls is a model's, and which of its markers are tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from router.tool_calls import tool_format
from tests.router.tiny_text import byte_tokenizer
from tests.router.tool_templates import FORMATS, QWEN, TEMPLATES, open_text, tool_tokenizer


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_template_tells(model: str) -> None:
    found = tool_format(TEMPLATES[model], tool_tokenizer())
    assert found is not None
    assert found.name == FORMATS[model]


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ messages[0].content }}",
        # Qwen 3 Coder, GLM 4.5, Mistral's later tokenizers, DeepSeek.
        "<tool_call>\n<function=name>\n<parameter=arguments>\n</function>\n</tool_call>",
        "<tool_call>name\n<arg_key>k</arg_key>{{ arguments }}</tool_call>",
        "[TOOL_CALLS]name[ARGS]{}",
        "<｜tool▁calls▁begin｜>",
    ],
)
def test_other_ways_are_not_known(template: str) -> None:
    assert tool_format(template, tool_tokenizer()) is None


def test_markers_may_be_special_tokens_other_tokens_or_text() -> None:
    found = tool_format(QWEN, tool_tokenizer())
    assert found is not None
    assert found.token_ids.keys() == {"<tool_call>", "</tool_call>"}
    assert found.special_markers == frozenset()
    special = byte_tokenizer()
    special.add_special_tokens([AddedToken("<tool_call>", special=True)])
    found = tool_format(QWEN, special)
    assert found is not None
    assert (dict(found.token_ids), found.special_markers) == ({"<tool_call>": 258}, {"<tool_call>"})
    found = tool_format(QWEN, byte_tokenizer())
    assert found is not None
    assert (dict(found.token_ids), found.special_markers) == ({}, frozenset())


def test_special_markers_stay_in_the_text_of_chats_with_tools(tmp_path: Path) -> None:
    text, reference = open_text(tmp_path / "mistral", TEMPLATES["mistral"])
    answer = "a[TOOL_CALLS][]</s>"
    ids = reference.encode(answer, add_special_tokens=False)
    assert text.stream(keep_tool_markers=True).push(ids) == "a[TOOL_CALLS][]"
    assert text.stream().push(ids) == "a[]"
    assert text.stream(skip_special_tokens=False, keep_tool_markers=True).push(ids) == answer


def test_a_bare_object_needs_no_marker(tmp_path: Path) -> None:
    text, reference = open_text(tmp_path / "llama", TEMPLATES["llama"])
    ids = reference.encode("<|python_tag|>{}", add_special_tokens=False)
    assert text.stream(keep_tool_markers=True).push(ids) == "{}"
