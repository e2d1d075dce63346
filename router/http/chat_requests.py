"""The body of a chat as a request to router/inference.py.

Owns how messages and tools of OpenAI's become those of the gRPC contract, and when calls are forced. What a
model's template takes is said below.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import InvalidRequest
from baton.sampling import Grammar
from baton.v1.inference_service_pb2 import Chat, ChatMessage, ToolCall
from router.http.requests import Asked, common
from router.http.schema_chat import ChatBody, ContentPart, Message, Tool, ToolChoice
from router.tool_calls import ToolFormat
from router.tools import read_tools

# OpenAI's newer name for it.
_SYSTEM_ROLES: Final = frozenset({"developer", "system"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChat(Asked):
    """What the body of a chat asks for.

    functions: those whose calls are looked for in the answers; none where their text is left alone.
    """

    functions: tuple[str, ...] = ()


def chat(body: ChatBody, request_id: str, tool_format: ToolFormat | None) -> AskedChat:
    """The request of a body; raises InvalidRequest.

    tool_format: how the model writes calls, or None where that is not known.
    """
    names = {"chat": "messages", "prompt": "messages", "template_arguments": "chat_template_kwargs"}
    request = common(body, request_id, names)
    _set_max_tokens(body, request, names)
    if body.logprobs:
        request.logprobs = True
    if body.top_logprobs is not None:
        request.top_logprobs = body.top_logprobs
    tools = () if body.tool_choice == "none" else body.tools or ()
    request.chat.CopyFrom(conversation(body.messages, tools, body.chat_template_kwargs))
    is_free = not request.HasField("grammar")
    if forced := _forced(body, tools, tool_format):
        if not is_free:
            raise InvalidRequest(
                f"tool_choice forces a call, and {names['grammar']} another answer; give one",
                field="tool_choice",
            )
        names["grammar"] = "tools"
        request.grammar.CopyFrom(forced.to_proto())
    elif tools and not is_free:
        field = names["grammar"]
        raise InvalidRequest(
            f"{field} leaves no room for a call of the tools; leave one of both out, or set tool_choice to "
            "none",
            field=field,
        )
    functions = tuple(tool.function.name for tool in tools) if tool_format is not None else ()
    return AskedChat(requests=[request], names=names, functions=functions)


def conversation(
    messages: Sequence[Message] | None, tools: Sequence[Tool], arguments: dict[str, Any] | None
) -> Chat:
    """The conversation as the gRPC contract has it; raises InvalidRequest, naming the place."""
    if messages is None:
        raise InvalidRequest("messages is missing", field="messages")
    return Chat(
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools=[json.dumps(_tool(tool)) for tool in tools],
        template_arguments=json.dumps(arguments) if arguments else "",
    )


def _set_max_tokens(body: ChatBody, request: Any, names: dict[str, str]) -> None:
    if body.max_completion_tokens is None:
        return
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are one thing by two names, and differ; give one",
            field="max_tokens",
        )
    request.max_tokens = body.max_completion_tokens
    names["max_tokens"] = "max_completion_tokens"


def _forced(body: ChatBody, tools: Sequence[Tool], tool_format: ToolFormat | None) -> Grammar | None:
    """What an answer that must be a call has to match; None where it need not be one."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")
    if tool_format is None:
        raise InvalidRequest(
            "calls cannot be forced: how this model writes them is not known here; use auto",
            field="tool_choice",
        )
    return tool_format.grammar(
        read_tools([json.dumps(_tool(tool)) for tool in tools]),
        function=choice.function.name if isinstance(choice, ToolChoice) else "",
        parallel=body.parallel_tool_calls is not False,
    )


def _message(message: Message, place: str) -> ChatMessage:
    return ChatMessage(
        role="system" if message.role in _SYSTEM_ROLES else message.role,
        content=_content(message, place),
        tool_calls=[
            ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
    )


def _content(message: Message, place: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{place}.content is missing", field=f"{place}.content")
        return ""
    if isinstance(content, str):
        return content
    # As vLLM joins them.
    return "\n".join(_part(part, f"{place}.content[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, place: str) -> str:
    if part.type != "text":
        raise InvalidRequest(
            f"{place}: this model takes text; a part of type {part.type[:64]!r} is not supported", field=place
        )
    if part.text is None:
        raise InvalidRequest(f"{place}.text is missing", field=f"{place}.text")
    return part.text


def _tool(tool: Tool) -> dict[str, Any]:
    """As models are shown it: `strict` is a word between client and server."""
    function = tool.function
    given = {"description": function.description, "parameters": function.parameters}
    shown = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": function.name, **shown}}
