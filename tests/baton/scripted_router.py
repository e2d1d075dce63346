"""A router whose answers a test writes, on a real loopback port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import grpc

from baton.rpc_server import Registration, RpcServer
from baton.v1 import common_pb2, inference_service_pb2
from baton.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

GUARD_S = 10
Response = inference_service_pb2.GenerateResponse
Answer = Callable[["Scripted", Any], Awaitable[None]]

SUMMARY = inference_service_pb2.Summary(
    request_id="req-1",
    model="tiny",
    choices=[
        inference_service_pb2.Choice(finish_reason=common_pb2.FINISH_REASON_LENGTH, num_output_tokens=3)
    ],
    num_prompt_tokens=5,
    num_output_tokens=3,
    seed=2**63,
    timings=inference_service_pb2.Timings(
        bucket="<128",
        prefill_worker="p",
        ttft_ms=1.5,
        num_attempts=2,
        transfer_times=common_pb2.TransferTimes(wire_ms=2.5),
        transfer_hidden_share=0.25,
    ),
)


class Scripted(InferenceServiceServicer):
    """Answers as a test says, and remembers what it was asked and how its calls ended."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests: list[Any] = []
        self.remaining_s: list[float | None] = []
        self.metadata: list[dict[str, Any]] = []
        self.cancelled = threading.Event()

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            await self._answer(self, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        model = inference_service_pb2.Model(name="tiny", max_model_len=64, weights_id="abc")
        return inference_service_pb2.ListModelsResponse(models=[model])


async def chunk(context: Any, start: int, text: str, *logprobs: float) -> None:
    ids = [start + 10]
    part = inference_service_pb2.Chunk(start_index=start, token_ids=ids, text=text, logprobs=logprobs)
    await context.write(Response(chunk=part))


async def three_chunks(server: Scripted, context: Any) -> None:
    await chunk(context, 0, "one", -0.5)
    await chunk(context, 1, "")
    await chunk(context, 2, " two")
    await context.write(Response(summary=SUMMARY))


async def one_chunk_and_no_end(server: Scripted, context: Any) -> None:
    await chunk(context, 0, "one")
    await asyncio.Event().wait()


@asynccontextmanager
async def serving(
    answer: Answer = three_chunks, credentials: grpc.ServerCredentials | None = None, *, port: int = 0
) -> AsyncIterator[tuple[Scripted, RpcServer]]:
    scripted = Scripted(answer)
    registration = Registration(
        name="baton.v1.InferenceService", add=partial(add_InferenceServiceServicer_to_server, scripted)
    )
    async with await RpcServer.start([registration], port=port, credentials=credentials) as server:
        yield scripted, server


@contextmanager
def background(
    answer: Answer = three_chunks, credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[Scripted, str]]:
    """The same server on another thread, for callers that have no loop."""
    ready: Any = threading.Event()
    made: list[Any] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(answer, credentials) as (scripted, server):
            made.extend((scripted, server.address, stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(GUARD_S)
    scripted, address, stop = made
    try:
        yield scripted, address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(GUARD_S)
        loop.close()
