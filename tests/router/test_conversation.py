"""Chats from the wire: what templates get, and what is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.v1.inference_service_pb2 import Chat
from router.conversation import Conversation, num_chars

CALL = {"id": "c1", "name": "f", "arguments": '{"a": 1}'}


def test_templates_get_what_transformers_gives_them() -> None:
    chat = Chat(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [CALL, {"name": "g"}]},
            {"role": "tool", "content": "t", "tool_call_id": "c1"},
        ],
        tools=['{"type": "function", "function": {"name": "f"}}'],
        template_arguments='{"enable_thinking": false}',
    )
    read = Conversation.read(chat)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert read.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "t", "tool_call_id": "c1"},
    ]
    assert read.tools == [{"type": "function", "function": {"name": "f"}}]
    assert read.arguments == {"enable_thinking": False}


def test_where_there_are_no_tools_there_is_none() -> None:
    read = Conversation.read(Chat(messages=[{"role": "user", "content": "u"}]))
    assert (read.tools, read.arguments) == (None, {})


def test_all_that_was_written_counts() -> None:
    chat = Chat(
        messages=[{"role": "tool", "content": "12", "tool_call_id": "3", "tool_calls": [CALL]}],
        tools=["4567"],
        template_arguments="89",
    )
    assert num_chars(chat) == 9 + len("c1") + len("f") + len('{"a": 1}')


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "judge"},
            r"messages\[1\]: role 'judge' is unknown; allowed: assistant, system, tool, user",
        ),
        ({"role": "user", "tool_calls": [CALL]}, r"messages\[1\] has tool_calls; only the assistant's may"),
        ({"role": "user", "tool_call_id": "x"}, r"messages\[1\] has a tool_call_id; only a tool's may"),
        (
            {"role": "assistant", "tool_calls": [{"id": "x"}]},
            r"messages\[1\]\.tool_calls\[0\] names no function",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL, {"name": "f", "arguments": "{"}]},
            r"messages\[1\]\.tool_calls\[1\]\.function\.arguments is not valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]},
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be a JSON object",
        ),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, r"messages\[1\] has 129 calls; send at most 128"),
    ],
)
def test_bad_messages_are_refused_by_their_place(message: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        Conversation.read(Chat(messages=[{"role": "user", "content": "u"}, message]))
    assert error.value.field == "chat"


@pytest.mark.parametrize("arguments", ["{", "[]", '"x"'])
def test_further_variables_are_an_object(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match="template_arguments") as error:
        Conversation.read(Chat(messages=[{"role": "user"}], template_arguments=arguments))
    assert error.value.field == "template_arguments"
