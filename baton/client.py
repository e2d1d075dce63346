"""The client SDK: generate text with a Baton cluster.

    from baton import AsyncClient

    async with await AsyncClient.connect("127.0.0.1:50051") as client:
        generation = client.generate("The capital of France is", max_tokens=16)
        async for chunk in generation:
            print(chunk.text, end="")
        print(generation.summary.finish_reason)

Owns the channel, the translation of errors, and the client's span. It shows no
protobuf type. A client does not survive a fork; connect in the child.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from baton.answer import Chunk, ModelInfo, Summary
from baton.errors import BatonError, Cancelled, InternalError, InvalidRequest, Unavailable
from baton.rpc import open_channel, translate
from baton.telemetry import ROOT_SPAN, Span, start_span
from baton.v1 import inference_service_pb2
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub

DEFAULT_TARGET = "127.0.0.1:50051"


class AsyncClient:
    """A connection to one router. Made by `await AsyncClient.connect(target)`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = InferenceServiceStub(channel)

    @classmethod
    async def connect(cls, target: str = DEFAULT_TARGET, *, timeout_s: float = 10.0) -> Self:
        """Connects to a router; raises Unavailable if it does not answer within timeout_s seconds."""
        channel = open_channel(target)
        try:
            async with asyncio.timeout(timeout_s):
                await channel.channel_ready()
        except TimeoutError:
            await channel.close()
            raise Unavailable(
                f"no router answers at {target}; is it running? `baton up` starts a local cluster"
            ) from None
        return cls(channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Generation:
        """Starts one generation and returns it; iterate over it for the chunks.

        Args:
            prompt: text to continue. Exactly one of prompt, messages and token_ids is given.
            messages: a conversation, each message with "role" and "content".
            token_ids: a tokenized prompt.
            timeout_s: deadline for the whole answer, in seconds; None for none.
            options: model, max_tokens, temperature, top_k, top_p, min_p, seed, stop_token_ids,
                ignore_eos, logprobs, request_id, as GenerateRequest in
                protos/baton/v1/inference_service.proto describes them.

        Raises:
            InvalidRequest: an option is unknown or cannot be sent; the router's own
                refusals arrive while iterating.
        """
        request = _request(prompt, messages, token_ids, options)
        span = start_span(ROOT_SPAN)
        metadata = (("traceparent", span.traceparent),) if span.traceparent else ()
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return Generation(call, span)

    async def list_models(self, *, timeout_s: float = 10.0) -> list[ModelInfo]:
        """The models this cluster serves."""
        try:
            response = await self._stub.ListModels(
                inference_service_pb2.ListModelsRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None
        return [ModelInfo.from_proto(model) for model in response.models]

    async def close(self) -> None:
        """Ends all calls and the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Generation:
    """One answer as it arrives. Iterate once; leaving early needs cancel() or `async with`."""

    def __init__(self, call: Any, span: Span) -> None:
        self._call = call
        self._span = span
        self._summary: Summary | None = None

    @property
    def summary(self) -> Summary:
        """How the generation went; there once the iteration has ended."""
        if self._summary is None:
            raise InternalError("the summary comes with the end of the answer; iterate to it first")
        return self._summary

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks; raises a BatonError if the generation fails."""
        try:
            async for response in self._call:
                if response.HasField("chunk"):
                    yield Chunk.from_proto(response.chunk)
                else:
                    self._summary = Summary.from_proto(response.summary)
            if self._summary is None:
                raise Unavailable("the router ended the answer in the middle")
        except grpc.aio.AioRpcError as error:
            failure = translate(error)
            self._span.fail(failure)
            raise failure from None
        except asyncio.CancelledError:
            # gRPC raises this too when cancel() or close() ends the call under its reader.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Cancelled("the generation was cancelled on this side") from None
        finally:
            self.cancel()

    async def text(self) -> str:
        """The whole answer, once it is there."""
        return "".join([chunk.text async for chunk in self])

    def cancel(self) -> None:
        """Ends the generation at the router and at both workers; idempotent, harmless after the end."""
        self._call.cancel()
        self._span.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


_OPTIONS = frozenset(field.name for field in inference_service_pb2.GenerateRequest.DESCRIPTOR.fields) - {
    "text",
    "chat",
    "token_ids",
}


def _request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> inference_service_pb2.GenerateRequest:
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
