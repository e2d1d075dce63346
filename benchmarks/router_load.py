"""Requests to a router, or to anything that serves its public contract, from a process of their own.

Owns that process, its connections and the client's clock. Bare stubs, not the SDK, so that as little as
possible is measured beside the router. What the figures are compared with is benchmarks/router.py's business.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from baton.rpc import open_channel
from baton.v1.inference_service_pb2 import GenerateRequest, TokenIds
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub
from benchmarks.child import Child
from benchmarks.sim_costs import sim_token

REQUEST_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """One load, a closed loop: the next request starts when one ends.

    concurrency: requests under way at once.  limit_s: no request starts later than that.
    """

    address: str
    num_requests: int
    concurrency: int = 1
    num_prompt_tokens: int = 64
    max_tokens: int = 1
    limit_s: float = 20.0
    seed: int = 0


@dataclass(slots=True)
class LoadResult:
    """What came of it.

    ttft_ms: from the call to the first token. added_ms: less what the prefill worker says that it took.
    """

    ttft_ms: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_chunks: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        """Requests that were answered."""
        return len(self.ttft_ms)


class LoadProcess:
    """The process; close() it."""

    def __init__(self) -> None:
        self._child = Child(_serve)

    def run(self, spec: LoadSpec) -> LoadResult:
        """Runs a load to its end; raises RuntimeError if a request failed."""
        result: LoadResult = self._child.ask(spec)
        if result.failures:
            raise RuntimeError(f"{len(result.failures)} requests failed; the first: {result.failures[0]}")
        return result

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._child.close()


def _serve(pipe: Connection) -> None:
    asyncio.run(_answer(pipe))


async def _answer(pipe: Connection) -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        try:
            spec: LoadSpec = pipe.recv()
        except EOFError:
            break
        async with open_channel(spec.address) as channel:
            await channel.channel_ready()
            pipe.send(await Load(spec, channel).run())
    asyncio.get_running_loop().remove_reader(pipe.fileno())


class Load:
    """One load on one channel."""

    def __init__(self, spec: LoadSpec, channel: grpc.aio.Channel) -> None:
        self._spec = spec
        self._stub = InferenceServiceStub(channel)
        self._rng = random.Random(spec.seed)
        self._result = LoadResult()
        self._num_left = spec.num_requests

    async def run(self) -> LoadResult:
        """Runs to the end of the last request."""
        deadline = time.perf_counter() + self._spec.limit_s
        async with asyncio.TaskGroup() as group:
            for _ in range(self._spec.concurrency):
                group.create_task(self._loop(deadline))
        return self._result

    async def _loop(self, deadline: float) -> None:
        while self._num_left > 0 and time.perf_counter() < deadline:
            self._num_left -= 1
            await self._one()

    async def _one(self) -> None:
        request, result = self._request(), self._result
        began, ttft_ms = time.perf_counter(), 0.0
        try:
            call: Any = self._stub.Generate(request, timeout=REQUEST_S)
            async for response in call:
                kind = response.WhichOneof("payload")
                if kind == "chunk" and response.chunk.token_ids:
                    ttft_ms = ttft_ms or 1000 * (time.perf_counter() - began)
                    result.num_tokens += len(response.chunk.token_ids)
                    result.num_chunks += 1
                elif kind == "summary":
                    result.ttft_ms.append(ttft_ms)
                    result.added_ms.append(ttft_ms - response.summary.timings.prefill_ms)
        except grpc.aio.AioRpcError as error:
            result.failures.append(f"{error.code().name}: {error.details()}")

    def _request(self) -> GenerateRequest:
        start = self._rng.randrange(1 << 20)
        token_ids = [sim_token(start + 7 * index) for index in range(self._spec.num_prompt_tokens)]
        return GenerateRequest(
            token_ids=TokenIds(ids=token_ids), max_tokens=self._spec.max_tokens, temperature=0.0, seed=1
        )
