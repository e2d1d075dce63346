"""The answers to one prompt as the client sees them, across the loss of a router.

An answer is its tokens: when a router is lost in the middle, the next one is asked to go on after
the tokens and the text that are here, with the same seed. Nothing is repeated, nothing is skipped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc.aio

from baton.answer import Answer, Chunk, PromptToken, Summary
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    Overloaded,
    Unavailable,
)
from baton.routers import Routers
from baton.rpc import is_from_baton, translate
from baton.telemetry import Span
from baton.v1 import inference_service_pb2

# How long an answer looks for a router that goes on with it, in seconds.
RESUME_S = 15.0
# Between two tries, doubling, with full jitter: all clients of a router lose it at the same moment.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 1.0

_CANCELLED = "the generation was cancelled on this side"


class Generation:
    """The answers to one prompt as they arrive. Iterate once; leaving early needs cancel() or `async with`.

    rng: spreads the tries of clients that lose the same router.
    """

    def __init__(
        self,
        routers: Routers,
        request: inference_service_pb2.GenerateRequest,
        span: Span,
        timeout_s: float | None,
        rng: random.Random,
    ) -> None:
        self._routers = routers
        self._request = request
        self._span = span
        self._rng = rng
        self._deadline_at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._summary: Summary | None = None
        self._lost_at: float | None = None
        self._longest_pause_s = FIRST_PAUSE_S
        self._so_far: dict[int, inference_service_pb2.PartialAnswer] = {}
        self._num_prompt_tokens = 0
        self._prompt_tokens: list[PromptToken] = []
        self._cancelled = asyncio.Event()
        self._call = self._start()

    @property
    def summary(self) -> Summary:
        """How the generation went; RuntimeError before the iteration has ended."""
        if self._summary is None:
            raise RuntimeError("the summary comes with the end of the answer; iterate to it first")
        return self._summary

    @property
    def prompt_logprobs(self) -> list[PromptToken | None]:
        """The prompt's tokens, if their log-probabilities were asked for; the first has none, and is None.

        Complete before the first chunk.
        """
        return [None, *self._prompt_tokens] if self._prompt_tokens else []

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks; raises a BatonError if the generation fails."""
        try:
            while self._summary is None:
                try:
                    async for chunk in self._receive():
                        yield chunk
                except grpc.aio.AioRpcError as error:
                    if self._summary is None:
                        await self._resume(error)
        except BatonError as failure:
            self._span.fail(failure)
            raise
        finally:
            self.cancel()

    async def text(self) -> str:
        """The text of the first answer, once all are there."""
        return (await self.answers())[0].text

    async def answers(self) -> list[Answer]:
        """The whole answers by index, once all are there."""
        chunks = [chunk async for chunk in self]
        return [Answer.join(choice, chunks) for choice in self.summary.choices]

    def cancel(self) -> None:
        """Ends the generation at the router and at both workers; idempotent, harmless after the end."""
        self._cancelled.set()
        self._call.cancel()
        self._span.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _start(self) -> Any:
        timeout_s = None
        if self._deadline_at is not None:
            timeout_s = max(0.0, self._deadline_at - asyncio.get_running_loop().time())
        traceparent = (("traceparent", self._span.traceparent),) if self._span.traceparent else ()
        metadata = (*self._routers.metadata, *traceparent)
        self._target = self._routers.target
        return self._routers.stub.Generate(self._request, timeout=timeout_s, metadata=metadata)

    async def _receive(self) -> AsyncIterator[Chunk]:
        """The chunks of one call, remembering what another call would need to go on."""
        try:
            async for response in self._call:
                match response.WhichOneof("payload"):
                    case "started":
                        self._begin(response.started)
                    case "prompt_logprobs":
                        self._extend_prompt(response.prompt_logprobs)
                    case "chunk":
                        if self._extend(response.chunk):
                            yield Chunk.from_proto(response.chunk)
                    case "summary":
                        self._summary = Summary.from_proto(response.summary)
        except asyncio.CancelledError:
            # gRPC raises this too when cancel() or close() ends the call under its reader.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if self._summary is None:
                raise Cancelled(_CANCELLED) from None
        if self._summary is None:
            raise Unavailable("the router ended the answer in the middle")

    def _begin(self, started: inference_service_pb2.Started) -> None:
        self._request.seed = started.seed
        self._request.request_id = started.request_id
        self._num_prompt_tokens = started.num_prompt_tokens

    def _extend(self, chunk: inference_service_pb2.Chunk) -> bool:
        """Whether it says anything new: a router that goes on ends once more what had ended."""
        if chunk.index not in self._so_far:
            self._so_far[chunk.index] = self._request.partial_answers.add(index=chunk.index)
        known = self._so_far[chunk.index]
        if chunk.start_index != len(known.token_ids):
            raise InternalError(
                f"the router went on at token {chunk.start_index} of answer {chunk.index}, token "
                f"{len(known.token_ids)} was due"
            )
        has_ended = bool(known.finish_reason)
        known.token_ids.extend(chunk.token_ids)
        known.num_chars += len(chunk.text)
        known.finish_reason = chunk.finish_reason
        if not has_ended:
            # Hearing once more of an end is no progress.
            self._lost_at = None
            self._longest_pause_s = FIRST_PAUSE_S
        return not has_ended

    def _extend_prompt(self, chunk: inference_service_pb2.PromptLogprobsChunk) -> None:
        """A router that goes on may begin with the prompt again; what is known adds nothing."""
        due = 1 + len(self._prompt_tokens)
        if chunk.start_index > due:
            raise InternalError(
                f"the router went on at token {chunk.start_index} of the prompt, token {due} was due"
            )
        self._prompt_tokens += PromptToken.from_proto(chunk)[due - chunk.start_index :]
        if len(self._prompt_tokens) + 1 == self._num_prompt_tokens:
            # Another router has no need to compute them once more.
            self._request.ClearField("prompt_logprobs")

    async def _resume(self, error: grpc.aio.AioRpcError) -> None:
        """Goes on at another router, or raises what the failed call stands for.

        What begins it is the loss of the router itself, or its word that it is about to leave: another error
        that a router reports is its answer, after it has tried what it can. Once begun, a router that has no
        workers yet is worth another try, and so is a full one, unless it asks for a longer wait than RESUME_S
        leaves.
        """
        now = asyncio.get_running_loop().time()
        failure = translate(error)
        is_resuming = self._lost_at is not None
        has_left = isinstance(failure, Draining) or not is_from_baton(error)
        # A router that is shut down cancels its calls; one that dies just ends them. Once begun, a full
        # queue passes too: all clients of a lost router come to the next one together.
        lost = isinstance(failure, Unavailable | Cancelled) and (is_resuming or has_left)
        lost = lost or (is_resuming and isinstance(failure, Overloaded))
        self._lost_at = self._lost_at or now
        # A router without workers has just begun, and is soon asked again; a full one says how long it takes.
        wait_s = (failure.retry_after_s or 0.0) if isinstance(failure, Overloaded) else 0.0
        if not lost or now + wait_s - self._lost_at > RESUME_S:
            raise failure from None
        self._routers.lose(self._target)
        pause_s = wait_s + self._rng.uniform(0, self._longest_pause_s)
        self._longest_pause_s = min(2 * self._longest_pause_s, LONGEST_PAUSE_S)
        if self._deadline_at is not None and now + pause_s >= self._deadline_at:
            raise DeadlineExceeded("the deadline comes before another router can go on with the answer")
        await self._pause(pause_s)
        self._call = self._start()

    async def _pause(self, pause_s: float) -> None:
        """Between two calls; raises Cancelled if that is called meanwhile."""
        try:
            async with asyncio.timeout(pause_s):
                await self._cancelled.wait()
        except TimeoutError:
            return
        raise Cancelled(_CANCELLED)
