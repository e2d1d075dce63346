"""The least that anything between clients and workers must do: the control of the router's benchmark.

A process that serves the router's public contract: for each request it asks a decode worker to compute and
generate everything, and writes each token that comes to the client's stream. The same messages as the
router's from the worker to the client, on the same gRPC options, and nothing else: no queue, no placement, no
text, no second worker, nothing that could be resumed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from typing import Any

from baton.identity import Identity
from baton.ports import Session, WorkerInfo
from baton.rpc_server import Registration, RpcServer
from baton.sessions import converse, first_message
from baton.v1 import common_pb2, decode_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from baton.v1.inference_service_pb2 import (
    Choice,
    Chunk,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Started,
    Summary,
    Timings,
)
from baton.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from benchmarks.child import Child
from router.dial import decode_dialer

REQUEST_ID = "0123456789abcdef"


class RelayProcess:
    """The process; close() it. decodes: the decode workers, taken in turn."""

    def __init__(self, decodes: Sequence[WorkerInfo], fingerprint: bytes) -> None:
        self._child = Child(_relay, list(decodes), fingerprint)
        self.address, self.pid = self._child.hear()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._child.close()


def _relay(decodes: list[WorkerInfo], fingerprint: bytes, pipe: Connection) -> None:
    asyncio.run(_serve(decodes, fingerprint, pipe))


async def _serve(decodes: list[WorkerInfo], fingerprint: bytes, pipe: Connection) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
    model = common_pb2.Fingerprint.FromString(fingerprint)
    identity = Identity.draw("relay", common_pb2.ROLE_ROUTER, model, random.SystemRandom())
    async with AsyncExitStack() as stack:
        upstreams = [await _Upstream.open(stack, info, identity) for info in decodes]
        register = Registration(
            name="baton.v1.InferenceService",
            add=lambda server: add_InferenceServiceServicer_to_server(_Relay(upstreams), server),
        )
        server = await stack.enter_async_context(await RpcServer.start([register]))
        pipe.send((server.address, os.getpid()))
        await ended.wait()
    asyncio.get_running_loop().remove_reader(pipe.fileno())


class _Upstream:
    """A session with a decode worker, and the requests on it."""

    def __init__(self, session: Session[DecodeServiceSessionRequest, Any]) -> None:
        self.session = session
        self.waiting: dict[bytes, asyncio.Queue[common_pb2.TokenEvent]] = {}

    @classmethod
    async def open(cls, stack: AsyncExitStack, info: WorkerInfo, identity: Identity) -> _Upstream:
        session = await stack.enter_async_context(decode_dialer().open(info))
        session.send(DecodeServiceSessionRequest(hello=identity.hello()))
        incoming = aiter(session)
        for _ in ("hello", "capacity"):
            await first_message(incoming, info.name)
        self = cls(session)
        talk = asyncio.create_task(converse(session, incoming, self._receive, self._heartbeat))
        stack.callback(talk.cancel)
        return self

    def _receive(self, message: DecodeServiceSessionResponse) -> None:
        if message.WhichOneof("message") == "step":
            for event in message.step.tokens:
                self.waiting[event.attempt_id].put_nowait(event)

    def _heartbeat(self) -> DecodeServiceSessionRequest:
        heartbeat = decode_service_pb2.DecodeRouterHeartbeat(attempt_ids=list(self.waiting))
        return DecodeServiceSessionRequest(heartbeat=heartbeat)


class _Relay(InferenceServiceServicer):
    def __init__(self, upstreams: Sequence[_Upstream]) -> None:
        self._turns = itertools.cycle(upstreams)
        self._rng = random.SystemRandom()

    async def ListModels(  # noqa: N802 - gRPC name
        self, request: ListModelsRequest, context: object
    ) -> ListModelsResponse:
        del request, context
        return ListModelsResponse()

    async def Generate(  # type: ignore[override]  # noqa: N802 - gRPC name
        self, request: GenerateRequest, context: Any
    ) -> None:
        attempt_id, upstream = self._rng.randbytes(16), next(self._turns)
        events = upstream.waiting[attempt_id] = asyncio.Queue()
        num_prompt_tokens = len(request.token_ids.ids)
        await context.write(
            GenerateResponse(started=Started(request_id=REQUEST_ID, num_prompt_tokens=num_prompt_tokens))
        )
        upstream.session.send(DecodeServiceSessionRequest(reserve=_reserve(attempt_id, request)))
        finish_reason, num_tokens = common_pb2.FINISH_REASON_UNSPECIFIED, 0
        while not finish_reason:
            event = await events.get()
            chunk = Chunk(start_index=event.start_index, token_ids=event.token_ids, text="!")
            await context.write(GenerateResponse(chunk=chunk))
            finish_reason, num_tokens = event.finish_reason, num_tokens + len(event.token_ids)
        del upstream.waiting[attempt_id]
        last = Chunk(start_index=num_tokens, finish_reason=finish_reason)
        await context.write(GenerateResponse(chunk=last))
        summary = Summary(
            request_id=REQUEST_ID,
            choices=[Choice(finish_reason=finish_reason, num_output_tokens=num_tokens)],
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_tokens,
            timings=Timings(),
        )
        await context.write(GenerateResponse(summary=summary))


def _reserve(attempt_id: bytes, request: GenerateRequest) -> decode_service_pb2.ReserveCommand:
    sequence = common_pb2.Sequence(
        request_id=REQUEST_ID,
        token_ids=request.token_ids.ids,
        num_prompt_tokens=len(request.token_ids.ids),
        sampling=common_pb2.SamplingParams(max_tokens=request.max_tokens, seed=request.seed),
    )
    return decode_service_pb2.ReserveCommand(attempt_id=attempt_id, sequence=sequence, compute_locally=True)
