"""Builds the GenerateRequest of a call to the SDK, naming the argument that cannot be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.errors import BatonError, InvalidRequest
from baton.sampling import Grammar
from baton.v1.inference_service_pb2 import Chat, ChatMessage, GenerateRequest

_OPTIONS = frozenset(field.name for field in GenerateRequest.DESCRIPTOR.fields) - {
    "text",
    "chat",
    "token_ids",
    "partial_answers",
}


def build_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> GenerateRequest:
    """The request; raises InvalidRequest for an unknown option or a value that its field cannot hold."""
    request = GenerateRequest()
    if prompt is not None:
        _set_with("prompt", lambda: request.MergeFrom(GenerateRequest(text=prompt)))
    if messages is not None:
        request.chat.SetInParent()
        for message in messages:
            _set(request, "chat", Chat(messages=[_message(message)]))
    if token_ids is not None:
        request.token_ids.SetInParent()
        _set_with("token_ids", lambda: request.token_ids.ids.extend(token_ids))
    for name, value in options.items():
        if name not in _OPTIONS:
            raise InvalidRequest(
                f"{name} is not an option; allowed: {', '.join(sorted(_OPTIONS))}", field=name
            )
        _set(request, name, value)
    return request


def _message(message: Mapping[str, str]) -> ChatMessage:
    try:
        return ChatMessage(role=message["role"], content=message["content"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f'a message needs "role" and "content", both valid text: {error}', field="messages"
        ) from None


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _grammar(value: Any) -> Any:
    if not isinstance(value, Grammar):
        raise TypeError("it must be a baton.Grammar")
    return value.to_proto()


# Options whose value in Python is not the value of their field.
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {"stop": _texts, "grammar": _grammar, "logit_bias": dict}


def _set(request: GenerateRequest, name: str, value: Any) -> None:
    if value is None:
        return

    def act() -> None:
        convert = _CONVERSIONS.get(name)
        sent = value if convert is None else convert(value)
        request.MergeFrom(GenerateRequest(**{name: sent}))

    _set_with(name, act)


def _set_with(name: str, act: Callable[[], None]) -> None:
    """protobuf refuses what a field cannot hold; the user learns which field that was."""
    try:
        act()
    except BatonError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be sent: {error}", field=name) from None
