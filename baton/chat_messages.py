"""Conversations as users of the SDK write them, as mappings, in the form they are sent in.

Owns the form of messages, of calls in them, and of tools, which is the one that OpenAI's API made common.
What a model makes of them, its template says, at the router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from baton.errors import InvalidRequest
from baton.v1.inference_service_pb2 import Chat, ChatMessage, ToolCall

Message = Mapping[str, Any]

_KEYS: Final = ("role", "content", "tool_calls", "tool_call_id")


def to_chat(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> Chat:
    """The conversation to send.

    Args:
        messages: each with "role" and "content", both text. One of the assistant may have "tool_calls", a
            sequence of {"id", "type": "function", "function": {"name", "arguments"}} whose arguments are a
            mapping or JSON text; its content may then be None. One of a tool has "tool_call_id".
        tools: functions that the model may call, each {"type": "function", "function": {...}}.
        template_arguments: further variables for the model's template.

    Raises InvalidRequest, naming the place, for what has another form.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _refused("messages", "a sequence of mappings")
    chat = Chat(messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)])
    if tools is not None:
        if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
            raise _refused("tools", "a sequence of mappings")
        chat.tools.extend(_json(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    if template_arguments is not None:
        chat.template_arguments = _json(template_arguments, "template_arguments")
    return chat


def _message(message: Message, place: str) -> ChatMessage:
    if not isinstance(message, Mapping) or not {"role"} <= set(message) <= set(_KEYS):
        raise _refused(place, f"a mapping with no other keys than {', '.join(_KEYS)}")
    calls = message.get("tool_calls") or ()
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise _refused(f"{place}.tool_calls", "a sequence of mappings")
    content = message.get("content")
    role = _text(message["role"], f"{place}.role")
    return ChatMessage(
        # OpenAI's newer name for it.
        role="system" if role == "developer" else role,
        # An assistant that only calls functions says nothing.
        content="" if content is None and calls else _text(content, f"{place}.content"),
        tool_calls=[_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)],
        tool_call_id=_text(message.get("tool_call_id", ""), f"{place}.tool_call_id"),
    )


def _call(call: Any, place: str) -> ToolCall:
    if not isinstance(call, Mapping) or not {"function"} <= set(call) <= {"id", "type", "function"}:
        raise _refused(place, 'a mapping with "id", "type" and "function"')
    if call.get("type", "function") != "function":
        raise _refused(f"{place}.type", '"function"')
    function = call["function"]
    if not isinstance(function, Mapping) or not {"name"} <= set(function) <= {"name", "arguments"}:
        raise _refused(f"{place}.function", 'a mapping with "name" and "arguments"')
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = _json(arguments, f"{place}.function.arguments")
    return ToolCall(
        id=_text(call.get("id", ""), f"{place}.id"),
        name=_text(function["name"], f"{place}.function.name"),
        arguments=_text(arguments, f"{place}.function.arguments"),
    )


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _refused(place, "text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refused(place, "text without lone surrogates") from None
    return value


def _json(value: Any, place: str) -> str:
    if not isinstance(value, Mapping):
        raise _refused(place, "a mapping")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place} cannot be written as JSON: {error}", field=place) from None


def _refused(place: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{place} cannot be sent: it must be {allowed}", field=place)
