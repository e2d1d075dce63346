"""Conversations: what of them is sent, and what is refused, by place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.chat_messages import to_chat
from baton.errors import InvalidRequest

USER = {"role": "user", "content": "What is the weather in Lima?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Lïma"}}}


def call(**function: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": function}


def asking(*calls: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": None, "tool_calls": list(calls)}]


def test_messages_arrive_in_their_order() -> None:
    sent = to_chat([USER, {"role": "assistant", "content": ""}]).messages
    assert [(message.role, message.content) for message in sent] == [
        ("user", "What is the weather in Lima?"),
        ("assistant", ""),
    ]


def test_calls_and_their_results_arrive() -> None:
    result = {"role": "tool", "content": "18 C", "tool_call_id": "c1"}
    _, assistant, tool = to_chat([*asking(CALL, call(name="now", arguments="{}")), result]).messages
    assert assistant.content == ""
    assert [(made.id, made.name) for made in assistant.tool_calls] == [("c1", "weather"), ("c1", "now")]
    assert json.loads(assistant.tool_calls[0].arguments) == {"city": "Lïma"}
    assert assistant.tool_calls[1].arguments == "{}"
    assert (tool.role, tool.content, tool.tool_call_id) == ("tool", "18 C", "c1")


def test_tools_and_arguments_of_the_template_are_json() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    chat = to_chat([USER], [tool], {"enable_thinking": False})
    assert [json.loads(text) for text in chat.tools] == [tool]
    assert json.loads(chat.template_arguments) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("messages", "place", "allowed"),
    [
        ("hi", "messages", "a sequence of mappings"),
        (5, "messages", "a sequence of mappings"),
        (USER, "messages", "a sequence of mappings"),
        (["hi"], "messages[0]", "a mapping with no other keys than role, content, tool_calls, tool_call_id"),
        ([{"content": "a"}], "messages[0]", "a mapping"),
        ([USER, {**USER, "name": "x"}], "messages[1]", "a mapping with no other keys"),
        ([{"role": 5, "content": "a"}], "messages[0].role", "text"),
        ([{"role": "user"}], "messages[0].content", "text"),
        ([{"role": "user", "content": None}], "messages[0].content", "text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "text"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content", "text without lone surrogates"),
        ([{**USER, "tool_call_id": None}], "messages[0].tool_call_id", "text"),
        ([{**USER, "tool_calls": CALL}], "messages[0].tool_calls", "a sequence of mappings"),
        (asking("now"), "messages[1].tool_calls[0]", 'a mapping with "id", "type" and "function"'),
        (asking(CALL, {**CALL, "x": 1}), "messages[1].tool_calls[1]", "a mapping"),
        (asking({**CALL, "type": "custom"}), "messages[1].tool_calls[0].type", '"function"'),
        (asking({**CALL, "id": 5}), "messages[1].tool_calls[0].id", "text"),
        (asking(call()), "messages[1].tool_calls[0].function", 'a mapping with "name"'),
        (asking(call(name=5)), "messages[1].tool_calls[0].function.name", "text"),
        (asking(call(name="a", arguments=5)), "messages[1].tool_calls[0].function.arguments", "a mapping"),
    ],
)
def test_another_form_is_refused_by_place(messages: Any, place: str, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        to_chat(messages)
    assert error.value.field == place
    assert error.value.message.startswith(f"{place} cannot be sent: it must be {allowed}")


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": ["now"]}, "tools[0]"),
        ({"tools": [{"parameters": {1, 2}}]}, "tools[0]"),
        ({"template_arguments": ["a"]}, "template_arguments"),
        ({"template_arguments": {"a": float("nan")}}, "template_arguments"),
    ],
)
def test_what_is_no_json_is_refused_by_place(given: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        to_chat([USER], **given)
    assert error.value.field == place


def test_developer_is_openais_newer_name_of_system() -> None:
    (message,) = to_chat([{"role": "developer", "content": "Be brief."}]).messages
    assert (message.role, message.content) == ("system", "Be brief.")
