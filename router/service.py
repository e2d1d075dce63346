"""The public gRPC service: read the request, run its generation, stream the answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from baton.errors import BatonError, Unavailable
from baton.models import ModelDir
from baton.telemetry import ROOT_SPAN, Span, start_span
from baton.v1 import inference_service_pb2
from baton.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from baton.v1.inference_service_pb2_grpc import InferenceServiceServicer
from router.buckets import BucketQueue
from router.config import RouterConfig
from router.dispatcher import Dispatcher, Ticket
from router.fleet import Fleet
from router.generation import Generation
from router.request import GenerationRequest, RequestReader
from router.text import Text, TextStream
from router.timeline import Timeline
from router.token_stream import TokenStream

Context = grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]
ResultT = TypeVar("ResultT")


class InferenceServicer(InferenceServiceServicer):
    """Serves one model.

    Every request is one Generation; `num_requests` counts those in flight.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        model: ModelDir,
        text: Text,
        queue: BucketQueue[Ticket],
        dispatcher: Dispatcher,
        fleet: Fleet,
        rng: random.Random,
    ) -> None:
        self.num_requests = 0
        self._config = config
        self._model = model
        self._queue = queue
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._rng = rng
        self._text = text
        self._reader = RequestReader(
            model=model.name,
            text=text,
            limits=model.limits,
            eos_token_ids=model.eos_token_ids,
            default_max_tokens=config.default_max_tokens,
            rng=rng,
        )

    # A coroutine that writes, not a generator, so that each write has its timeout.
    async def Generate(  # type: ignore[override]  # noqa: N802 - gRPC name
        self, request: GenerateRequest, context: Context
    ) -> None:
        """Streams one answer. The call's deadline is the request's; a cancelled call cancels it."""
        arrived_at = asyncio.get_running_loop().time()
        span = start_span(ROOT_SPAN, parent=_traceparent(context))
        self.num_requests += 1
        try:
            remaining_s = context.time_remaining()
            validated = await self._reader.read(
                request,
                arrived_at=arrived_at,
                deadline_at=None if remaining_s is None else arrived_at + remaining_s,
                traceparent=span.traceparent,
            )
            span.set(**{"baton.request_id": validated.request_id})
            await self._answer(validated, span, context)
        except BatonError as error:
            span.fail(error)
            raise
        finally:
            self.num_requests -= 1
            span.end()

    async def ListModels(  # noqa: N802 - gRPC name
        self, request: inference_service_pb2.ListModelsRequest, context: object
    ) -> inference_service_pb2.ListModelsResponse:
        """The one model served."""
        del request, context
        model = inference_service_pb2.Model(
            name=self._model.name,
            max_model_len=self._model.max_model_len,
            weights_id=self._model.weights_id,
        )
        return inference_service_pb2.ListModelsResponse(models=[model])

    async def _answer(self, request: GenerationRequest, span: Span, context: Context) -> None:
        started = inference_service_pb2.Started(request_id=request.request_id, seed=request.params.seed)
        await self._write(context, GenerateResponse(started=started))
        stream = TokenStream(len(request.output_token_ids))
        bucket = self._queue.labels[self._queue.bucket(len(request.prompt_token_ids))]
        timeline = Timeline(request.arrived_at, bucket)
        generation = Generation(
            request,
            config=self._config,
            dispatcher=self._dispatcher,
            fleet=self._fleet,
            limits=self._model.limits,
            stream=stream,
            timeline=timeline,
            span=span,
            rng=self._rng,
        )
        task = asyncio.create_task(generation.run(), name=f"generation-{request.request_id}")
        try:
            await self._relay(stream, request.output_token_ids, context)
            await task
            summary = self._summary(generation, timeline)
            await self._write(context, GenerateResponse(summary=summary))
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                # Where the client left first, nobody else asks how the generation ended.
                task.exception()

    async def _relay(self, stream: TokenStream, delivered: list[int], context: Context) -> None:
        text = self._text.stream()
        # The client has the text of what it has the tokens of.
        text.push(delivered)
        num_tokens = len(delivered)
        while (tokens := await stream.next()) is not None:
            num_tokens = tokens.start_index + len(tokens.token_ids)
            chunk = inference_service_pb2.Chunk(
                start_index=tokens.start_index,
                token_ids=tokens.token_ids,
                text=text.push(tokens.token_ids),
                logprobs=tokens.logprobs,
            )
            await self._write(context, GenerateResponse(chunk=chunk))
        await self._write_rest(text, num_tokens, context)

    async def _write_rest(self, text: TextStream, num_tokens: int, context: Context) -> None:
        rest = text.flush()
        if rest:
            chunk = inference_service_pb2.Chunk(start_index=num_tokens, text=rest)
            await self._write(context, GenerateResponse(chunk=chunk))

    async def _write(self, context: Context, response: GenerateResponse) -> None:
        await within(
            self._config.write_timeout_s,
            lambda: context.write(response),
            f"the client has read nothing for {self._config.write_timeout_s:g} s",
        )

    def _summary(self, generation: Generation, timeline: Timeline) -> inference_service_pb2.Summary:
        request = generation.request
        return inference_service_pb2.Summary(
            request_id=request.request_id,
            model=self._model.name,
            finish_reason=generation.finish_reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(generation.token_ids),
            seed=request.params.seed,
            timings=timeline.timings(),
        )


async def within(timeout_s: float, act: Callable[[], Awaitable[ResultT]], message: str) -> ResultT:
    """Awaits act() for at most timeout_s seconds; raises Unavailable(message) after that."""
    try:
        async with asyncio.timeout(timeout_s):
            return await act()
    except TimeoutError:
        raise Unavailable(message) from None


def _traceparent(context: Context) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == "traceparent"), "")
