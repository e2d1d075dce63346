"""Builds the GenerateRequest of a call to the SDK, naming the argument that cannot be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from baton.chat_messages import Message, to_chat
from baton.errors import BatonError, InvalidRequest
from baton.priorities import PRIORITIES
from baton.rpc import MAX_MESSAGE_BYTES
from baton.sampling import Grammar
from baton.v1.inference_service_pb2 import GenerateRequest

_OPTIONS = frozenset(field.name for field in GenerateRequest.DESCRIPTOR.fields) - {
    "text",
    "chat",
    "token_ids",
    "partial_answers",
}
_OF_CHATS = ("tools", "template_arguments")


def build_request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> GenerateRequest:
    """The request; raises InvalidRequest for an unknown option or a value that its field cannot hold.

    Also for anything but exactly one of prompt, messages and token_ids, and for a request too large to send.
    """
    prompts = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"give exactly one of {', '.join(prompts)}; given: {', '.join(given) or 'none'}", field="prompt"
        )
    request = GenerateRequest()
    if prompt is not None:
        _set_with("prompt", lambda: request.MergeFrom(GenerateRequest(text=_str(prompt))))
    of_chat = {name: options[name] for name in _OF_CHATS if options.get(name) is not None}
    if messages is not None:
        request.chat.SetInParent()
        request.chat.CopyFrom(to_chat(messages, **of_chat))
    elif of_chat:
        name = next(iter(of_chat))
        raise InvalidRequest(
            f"{name} is an option of conversations: give messages, not {given[0]}", field=name
        )
    if token_ids is not None:
        request.token_ids.SetInParent()
        _set_with("token_ids", lambda: request.token_ids.ids.extend(token_ids))
    for name, value in options.items():
        if name in _OF_CHATS:
            continue
        if name not in _OPTIONS:
            allowed = ", ".join(sorted(_OPTIONS.union(_OF_CHATS)))
            raise InvalidRequest(f"{name} is not an option; allowed: {allowed}", field=name)
        _set(request, name, value)
    if (num_bytes := request.ByteSize()) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request takes {num_bytes} bytes; at most {MAX_MESSAGE_BYTES} can be sent: "
            f"shorten {given[0]}",
            field=given[0],
        )
    return request


def _str(value: str) -> str:
    """protobuf would take bytes too."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _seed(value: int) -> int:
    """A number below 0 is taken as its two's complement, as by the HTTP door."""
    is_signed = isinstance(value, int) and -(2**63) <= value < 0
    return value + 2**64 if is_signed else value


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _grammar(value: Any) -> Any:
    if not isinstance(value, Grammar):
        raise TypeError
    return value.to_proto()


def _priority(value: Any) -> Any:
    if value not in PRIORITIES:
        raise ValueError
    return PRIORITIES[value]


# Options whose value in Python is not the value of their field.
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "stop": _texts,
    "seed": _seed,
    "grammar": _grammar,
    "logit_bias": dict,
    "priority": _priority,
}


def _set(request: GenerateRequest, name: str, value: Any) -> None:
    if value is None:
        return

    def act() -> None:
        convert = _CONVERSIONS.get(name)
        sent = value if convert is None else convert(value)
        request.MergeFrom(GenerateRequest(**{name: sent}))

    _set_with(name, act)


def _set_with(name: str, act: Callable[[], None]) -> None:
    """protobuf refuses what a field cannot hold; the user learns which field that was, and what it holds."""
    try:
        act()
    except BatonError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{name} cannot be sent: it must be {_allowed(name)}", field=name) from None


def _allowed(name: str) -> str:
    if name in _ALLOWED:
        return _ALLOWED[name]
    field = GenerateRequest.DESCRIPTOR.fields_by_name[name]
    each = _VALUES[field.cpp_type]
    return f"a sequence, each {each}" if field.is_repeated else each


_VALUES: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number below 2**31",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number from 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text",
}
_ALLOWED: Mapping[str, str] = {
    "prompt": "text (ids of tokens go to token_ids=, messages of a chat to messages=)",
    "token_ids": "a sequence, each a whole number from 0 to 2**32 - 1",
    "stop": "a text or a sequence of texts",
    "logit_bias": "a mapping from token ids to numbers",
    "grammar": "a baton.Grammar",
    "seed": "a whole number from -2**63 to 2**64 - 1",
    "priority": f"one of {', '.join(PRIORITIES)}",
}
