"""The answers to one prompt as the client sees them, across the loss of a router.

An answer is its tokens: when a router is lost in the middle, the next one is asked to go on after
the tokens and the text that are here, with the same seed. Nothing is repeated, nothing is skipped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
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
from baton.retry import DEFAULT_RETRY, Retry, Tries
from baton.routers import Routers
from baton.rpc import is_from_baton, translate
from baton.telemetry import Span
from baton.v1 import inference_service_pb2

_CANCELLED = "the generation was cancelled on this side"


class Generation:
    """The answers to one prompt as they arrive, from AsyncClient.generate() and chat().

    It keeps what has come: text() and answers() are the whole also after an iteration, and another iteration
    begins with the first chunk again. Leaving early needs cancel() or `async with`:

    >>> from baton import AsyncClient
    >>> client = await AsyncClient.connect("127.0.0.1:50051")
    >>> async with client.generate("The first letters are", max_tokens=26) as generation:
    ...     async for chunk in generation:
    ...         print(chunk.text)
    ...         if "C" in chunk.text:
    ...             break
     A,
     B,
     C,
    >>> await client.close()

    retry: when it asks again.  rng: spreads the tries of clients that lose the same router.
    """

    def __init__(
        self,
        routers: Routers,
        request: inference_service_pb2.GenerateRequest,
        span: Span,
        timeout_s: float | None,
        rng: random.Random,
        *,
        retry: Retry = DEFAULT_RETRY,
    ) -> None:
        self._routers = routers
        self._request = request
        self._span = span
        self._tries = Tries(retry, rng)
        self._deadline_at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._summary: Summary | None = None
        self._so_far: dict[int, inference_service_pb2.PartialAnswer] = {}
        self._num_prompt_tokens = 0
        self._prompt_tokens: list[PromptToken] = []
        self._chunks: list[Chunk] = []
        self._failure: BatonError | None = None
        self._is_being_read = False
        self._cancelled = asyncio.Event()
        self._call = self._start()

    def __repr__(self) -> str:
        state = "ended" if self._summary else "broken off" if self._cancelled.is_set() else "open"
        return f"<{type(self).__name__} {self.request_id}, {state}>"

    @property
    def request_id(self) -> str:
        """Its name in logs, in traces and for `baton explain`: what the caller gave, or one drawn for it."""
        return self._request.request_id

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

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        """The chunks.

        Raises:
            InvalidRequest: the router refuses the request; `field` names the part to change.
            Unauthenticated: the router wants an API key, or another one.
            Overloaded, Unavailable: it could not be served within what `retry` allows.
            DeadlineExceeded: timeout_s has passed.
            Cancelled: cancel() was called, or the client closed.
            BatonError: anything else; baton/errors.py has the tree.
            RuntimeError: it is being read elsewhere, which goes on.
        """
        if self._is_being_read and not self._cancelled.is_set():
            raise RuntimeError(
                "the generation is being read already, by another task or by a loop that was left without "
                "`async with`; read it in one place, and any number of times after that"
            )
        self._is_being_read = True
        try:
            for chunk in self._chunks:
                yield chunk
            async for chunk in self._rest():
                self._chunks.append(chunk)
                yield chunk
        finally:
            self._is_being_read = False
            self.cancel()

    async def text(self) -> str:
        """The text of the first answer, once all are there; raises as the iteration does."""
        return (await self.answers())[0].text

    async def answers(self) -> list[Answer]:
        """The whole answers by index, once all are there; raises as the iteration does."""
        async for _chunk in self:
            pass
        return self.known_answers()

    def known_answers(self) -> list[Answer]:
        """The whole answers by index, if all are there already; otherwise an empty list."""
        if self._summary is None:
            return []
        return [Answer.join(choice, self._chunks) for choice in self._summary.choices]

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
        self._was_accepted = False
        return self._routers.stub.Generate(self._request, timeout=timeout_s, metadata=metadata)

    async def _rest(self) -> AsyncIterator[Chunk]:
        """The chunks that nobody has read yet, over as many calls as it takes; none after the end."""
        if self._failure is not None:
            raise self._failure
        try:
            while self._summary is None:
                if self._cancelled.is_set():
                    raise Cancelled(_CANCELLED)
                try:
                    async for chunk in self._receive():
                        yield chunk
                except grpc.aio.AioRpcError as error:
                    if self._summary is None:
                        await self._resume(error)
        except BatonError as failure:
            failure.request_id = self.request_id
            self._span.fail(failure)
            self._failure = failure
            raise

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
        self._was_accepted = True
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
            self._tries.progress()
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
        """Asks once more, at the next router if there is one, or raises what the failed call stands for."""
        now = asyncio.get_running_loop().time()
        failure, is_routers_word = translate(error), is_from_baton(error)
        pause_s = None
        if not self._is_missed_objective(failure):
            pause_s = self._tries.pause_after(
                failure,
                now,
                is_routers_word=is_routers_word,
                was_accepted=self._was_accepted,
                has_begun=bool(self._so_far),
            )
        if pause_s is None:
            raise failure from None
        self._routers.lose(self._target)
        if self._deadline_at is not None and now + pause_s >= self._deadline_at:
            # A refusal says more than that there is no time to ask again; the loss of a router does not.
            if is_routers_word and not self._so_far and not isinstance(failure, Draining):
                raise failure from None
            raise DeadlineExceeded("the deadline comes before another router can go on with the answer")
        await self._pause(pause_s)
        self._call = self._start()

    def _is_missed_objective(self, failure: BatonError) -> bool:
        """Whether the first token cannot come when it is wanted: waiting would only make it later."""
        is_strict = self._request.HasField("ttft_objective_ms")
        return is_strict and not self._so_far and isinstance(failure, Overloaded)

    async def _pause(self, pause_s: float) -> None:
        """Between two calls; raises Cancelled if that is called meanwhile."""
        try:
            async with asyncio.timeout(pause_s):
                await self._cancelled.wait()
        except TimeoutError:
            return
        raise Cancelled(_CANCELLED)
