"""A chat from the wire, checked, in the form that chat templates take.

Knows no template: what a model's own refuses is for router/chat_template.py to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from baton.v1.inference_service_pb2 import Chat, ChatMessage, ToolCall
from router.tools import read_object, read_tools

MAX_MESSAGES = 1_000
MAX_CALLS = 128
ROLES = frozenset({"system", "user", "assistant", "tool"})

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What transformers' apply_chat_template is given.

    messages: with "role", "content" and, only where there are any, "tool_calls" and "tool_call_id". A call is
        {"id", "type", "function": {"name", "arguments": a mapping}}.
    tools: definitions of functions, or None.
    arguments: further variables of the template.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]

    @classmethod
    def read(cls, chat: Chat) -> Conversation:
        """The conversation of a message; raises InvalidRequest, naming the field and the place."""
        if not 1 <= len(chat.messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                f"the chat has {len(chat.messages)} messages; send between 1 and {MAX_MESSAGES}", field="chat"
            )
        arguments = chat.template_arguments
        return cls(
            messages=[_message(m, f"messages[{index}]") for index, m in enumerate(chat.messages)],
            tools=read_tools(chat.tools) or None,
            arguments=read_object(arguments, "template_arguments", field="template_arguments")
            if arguments
            else {},
        )


def num_chars(chat: Chat) -> int:
    """Characters of a chat, of all that people and tools wrote; needs no reading of JSON."""
    messages = sum(
        len(message.content)
        + len(message.tool_call_id)
        + sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in chat.messages
    )
    return messages + sum(map(len, chat.tools)) + len(chat.template_arguments)


def _message(message: ChatMessage, place: str) -> Message:
    role = message.role
    if role not in ROLES:
        raise InvalidRequest(
            f"{place}: role {role[:64]!r} is unknown; allowed: {', '.join(sorted(ROLES))}", field="chat"
        )
    read: Message = {"role": role, "content": message.content}
    if message.tool_calls:
        if role != "assistant":
            raise InvalidRequest(f"{place} has tool_calls; only the assistant's may", field="chat")
        read["tool_calls"] = _calls(message.tool_calls, place)
    if message.tool_call_id:
        if role != "tool":
            raise InvalidRequest(f"{place} has a tool_call_id; only a tool's may", field="chat")
        read["tool_call_id"] = message.tool_call_id
    return read


def _calls(calls: Sequence[ToolCall], place: str) -> list[dict[str, Any]]:
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{place} has {len(calls)} calls; send at most {MAX_CALLS}", field="chat")
    return [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidRequest(f"{place} names no function", field="chat")
    # What calls without arguments have, from some clients.
    arguments = read_object(call.arguments or "{}", f"{place}.function.arguments", field="chat")
    function = {"name": call.name, "arguments": arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}
