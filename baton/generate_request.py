"""Builds the GenerateRequest of a call to the SDK, naming the argument that cannot be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import BatonError, InvalidRequest
from baton.v1 import inference_service_pb2

_OPTIONS = frozenset(field.name for field in inference_service_pb2.GenerateRequest.DESCRIPTOR.fields) - {
    "text",
    "chat",
    "token_ids",
}


def build_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> inference_service_pb2.GenerateRequest:
    """The request; raises InvalidRequest for an unknown option or a value that its field cannot hold."""
    request = inference_service_pb2.GenerateRequest()
    if prompt is not None:
        _set_with("prompt", lambda: request.MergeFrom(inference_service_pb2.GenerateRequest(text=prompt)))
    if messages is not None:
        request.chat.SetInParent()
        for message in messages:
            _set(request, "chat", inference_service_pb2.Chat(messages=[_message(message)]))
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


def _message(message: Mapping[str, str]) -> inference_service_pb2.ChatMessage:
    try:
        return inference_service_pb2.ChatMessage(role=message["role"], content=message["content"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f'a message needs "role" and "content", both valid text: {error}', field="messages"
        ) from None


def _set(request: inference_service_pb2.GenerateRequest, name: str, value: Any) -> None:
    if value is not None:
        _set_with(name, lambda: request.MergeFrom(inference_service_pb2.GenerateRequest(**{name: value})))


def _set_with(name: str, act: Any) -> None:
    """protobuf refuses what a field cannot hold; the user learns which field that was."""
    try:
        act()
    except BatonError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be sent: {error}", field=name) from None
