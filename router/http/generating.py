"""POST /v1/completions and POST /v1/chat/completions: from a body to its answers.

Owns how a request with several prompts becomes several calls of router/inference.py, side by side.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

from baton.errors import InvalidRequest
from baton.models import ModelDir
from baton.v1.inference_service_pb2 import GenerateResponse
from router.http.answers import Shape
from router.http.bodies import Bodies
from router.http.chat_requests import AskedChat, chat
from router.http.chat_shape import ChatShape
from router.http.completion_shape import CompletionShape
from router.http.event_stream import EventStream
from router.http.exchange import Exchange
from router.http.logprobs import LogprobShapes, Offsets
from router.http.requests import Asked, completion
from router.http.response import Head, ResponseWriter, StreamedResponse, WholeResponse
from router.http.schema import GenerationBody, StreamOptions
from router.http.schema_chat import ChatBody
from router.http.schema_completions import CompletionBody
from router.http.validation import read
from router.inference import Inference
from router.tenancy.tenants import Metadata
from router.text import Text

# Of a completion that names none, as at OpenAI's.
COMPLETION_TOKENS = 16


class Generating:
    """The two endpoints.

    rng: source of the ids of tool calls.
    wall: seconds since 1970.
    """

    def __init__(
        self,
        inference: Inference,
        model: ModelDir,
        text: Text,
        bodies: Bodies,
        *,
        rng: random.Random,
        wall: Callable[[], float],
    ) -> None:
        self._inference = inference
        self._model = model
        self._text = text
        self._bodies = bodies
        self._rng = rng
        self._wall = wall
        self._logprobs = LogprobShapes(text.texts)

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        self._inference.check_key(exchange.metadata)

        def read_it(raw: bytes) -> tuple[CompletionBody, Asked]:
            body = read(CompletionBody, raw)
            return body, completion(body, exchange.request_id)

        body, asked = await self._bodies.read(await exchange.body(), read_it)
        keep_special = body.skip_special_tokens is False
        shape = CompletionShape(
            None if body.logprobs is None else self._logprobs,
            lambda: Offsets(self._text.stream(skip_special_tokens=not keep_special)),
            with_ids=bool(body.return_token_ids),
        )
        await exchange.while_connected(self._answer(exchange, body, asked, shape, COMPLETION_TOKENS))

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        self._inference.check_key(exchange.metadata)
        tool_format = self._text.tool_format

        def read_it(raw: bytes) -> tuple[ChatBody, AskedChat]:
            body = read(ChatBody, raw)
            return body, chat(body, exchange.request_id, tool_format)

        body, asked = await self._bodies.read(await exchange.body(), read_it)
        parser = None
        if tool_format is not None and asked.functions:
            parallel = body.parallel_tool_calls is not False
            parser = partial(tool_format.parser, asked.functions, self._rng, parallel=parallel)
        shape = ChatShape(
            self._logprobs if body.logprobs else None, parser, with_ids=bool(body.return_token_ids)
        )
        # As much as the context has room for.
        most = self._model.max_model_len
        await exchange.while_connected(self._answer(exchange, body, asked, shape, most))

    async def _answer(
        self,
        exchange: Exchange,
        body: GenerationBody,
        asked: Asked,
        shape: Shape,
        default_max_tokens: int,
    ) -> None:
        writer = self._writer(exchange, body, shape)
        calls = [
            (request, HttpCall(exchange, partial(writer.take, prompt), default_max_tokens))
            for prompt, request in enumerate(asked.requests)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for request, call in calls:
                    group.create_task(self._inference.generate(request, call))
        except BaseExceptionGroup as failures:
            error = failures.exceptions[0]
            raise (asked.renamed(error) if isinstance(error, InvalidRequest) else error) from None
        await writer.end()

    def _writer(self, exchange: Exchange, body: GenerationBody, shape: Shape) -> ResponseWriter:
        head = Head(
            request_id=exchange.request_id,
            created=int(self._wall()),
            model=self._model.name,
            fingerprint=f"fp_{self._model.weights_id[:12]}",
            n=1 if body.n is None else body.n,
        )
        if not body.stream:
            return WholeResponse(exchange, head, shape, self._logprobs)
        exchange.stream = EventStream(exchange)
        options = body.stream_options or StreamOptions()
        return StreamedResponse(
            exchange.stream,
            head,
            shape,
            usage=bool(options.include_usage),
            continuous=bool(options.continuous_usage_stats),
        )


class HttpCall:
    """An exchange, for one of its prompts, as router.inference.Call."""

    def __init__(
        self,
        exchange: Exchange,
        take: Callable[[GenerateResponse], Awaitable[None]],
        default_max_tokens: int,
    ) -> None:
        self.metadata: Metadata = exchange.metadata
        self.traceparent = exchange.traceparent
        self.remaining_s = exchange.remaining_s
        self.default_max_tokens = default_max_tokens
        self._take = take

    async def write(self, response: GenerateResponse) -> None:
        """Sends one message; waits while the reader is behind."""
        await self._take(response)
