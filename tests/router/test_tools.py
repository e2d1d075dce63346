"""Definitions of functions: every bad one is refused by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.tools import MAX_TOOLS, read_object, read_tools


def tool(**function: Any) -> str:
    return json.dumps({"type": "function", "function": {"name": "f", **function}})


def test_good_ones_are_left_as_they_are() -> None:
    texts = [
        tool(name="a-Z_9"),
        tool(name="b" * 64, description="é", parameters={"type": "object", "properties": {"x": {}}}),
        tool(name="c", description=None, parameters=None, strict=True),
    ]
    assert read_tools(texts) == [json.loads(text) for text in texts]
    assert read_tools([]) == []


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["{"], r"tools\[0\] is not valid JSON: line 1, column 2"),
        ([tool(), "[]"], r"tools\[1\] must be a JSON object"),
        (['{"type": "function", "function": {"name": "f", "x": NaN}}'], "NaN is not JSON"),
        ([tool(description="\ud800")], "half of a pair of surrogates"),
        ([tool(x=json.loads("[" * 80 + "]" * 80))], "nested more than 64 deep"),
        (['{"a":' * 100_000], "not valid JSON: it is nested too deep"),
        (['{"function": {"name": "f"}}'], r"tools\[0\]\.type: it must be \"function\""),
        (['{"type": "retrieval"}'], r"tools\[0\]\.type"),
        (['{"type": "function"}'], r"tools\[0\]\.function: it must be an object"),
        ([tool(name="")], r"tools\[0\]\.function\.name"),
        ([tool(name="a b")], r"tools\[0\]\.function\.name"),
        ([tool(name="a\n")], r"tools\[0\]\.function\.name"),
        ([tool(name="é")], r"tools\[0\]\.function\.name"),
        ([tool(name="b" * 65)], "1 to 64"),
        ([tool(name=3)], r"tools\[0\]\.function\.name"),
        ([tool(), tool()], r"tools\[1\]\.function\.name: 'f' names another function too"),
        ([tool(description=3)], r"tools\[0\]\.function\.description: it must be text"),
        ([tool(parameters=[])], r"tools\[0\]\.function\.parameters"),
        ([tool(parameters=True)], r"tools\[0\]\.function\.parameters"),
        ([tool(parameters={"type": "string"})], r"tools\[0\]\.function\.parameters"),
        ([tool(name=f"f{index}") for index in range(MAX_TOOLS + 1)], "send at most 128"),
    ],
)
def test_bad_ones_are_refused_by_their_place(texts: list[str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        read_tools(texts)
    assert error.value.field == "tools"


def test_numbers_are_left_as_they_are() -> None:
    text = '{"a": 12345678901234567890, "b": 1.5, "c": -0.0, "d": true, "e": null}'
    assert json.dumps(read_object(text, "x", field="x")) == text
