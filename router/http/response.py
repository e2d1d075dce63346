"""Turns what router/inference.py writes into one response: a JSON object, or a stream of events.

Owns the order of a stream: the first token, with the status; the others; the usage; the end. Knows neither
bodies nor how an endpoint writes its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from baton.v1 import inference_service_pb2
from baton.v1.inference_service_pb2 import GenerateResponse
from router.http.answers import Collected, Shape, Usage
from router.http.event_stream import EventStream
from router.http.exchange import Exchange, to_json
from router.http.logprobs import LogprobShapes

DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a response says beside its choices.

    n: answers per prompt, so that choices are numbered prompt by prompt.
    created: seconds since 1970.
    """

    request_id: str
    created: int
    model: str
    fingerprint: str
    n: int

    def shape(self, kind: str, prefix: str) -> dict[str, Any]:
        """The beginning of each object. kind: its name."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ResponseWriter(Protocol):
    """What takes the messages of all prompts of a request."""

    async def take(self, prompt: int, message: GenerateResponse) -> None:
        """The next message about that prompt; waits while the reader is behind."""

    async def end(self) -> None:
        """All answers are complete."""


def _count(usage: Usage, summary: inference_service_pb2.Summary) -> None:
    usage.num_prompt_tokens += summary.num_prompt_tokens
    usage.num_output_tokens += summary.num_output_tokens
    usage.num_cached_tokens = (usage.num_cached_tokens or 0) + summary.num_cached_tokens


class WholeResponse:
    """One JSON object, sent at the end."""

    def __init__(self, exchange: Exchange, head: Head, shape: Shape, prompt_shapes: LogprobShapes) -> None:
        self._exchange = exchange
        self._head = head
        self._shape = shape
        self._prompt_shapes = prompt_shapes
        self._usage = Usage()
        self._answers: dict[int, Collected] = {}
        self._prompts: dict[int, list[dict[str, Any] | None]] = {}

    async def take(self, prompt: int, message: GenerateResponse) -> None:
        """Keeps it."""
        match message.WhichOneof("payload"):
            case "chunk":
                index = prompt * self._head.n + message.chunk.index
                self._answers.setdefault(index, Collected()).add(message.chunk)
            case "prompt_logprobs":
                chunk = message.prompt_logprobs
                # The first token of a prompt follows nothing.
                entries = self._prompts.setdefault(prompt, [None])
                entries += self._prompt_shapes.of_prompt(chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
            case "summary":
                _count(self._usage, message.summary)

    async def end(self) -> None:
        """Sends it."""
        response = self._head.shape(self._shape.whole, self._shape.prefix)
        response["choices"] = [
            self._shape.choice(index, self._answers[index]) for index in sorted(self._answers)
        ]
        response["usage"] = self._usage.shape()
        for prompt, entries in self._prompts.items():
            self._shape.place_prompt(response, prompt * self._head.n, entries)
        await self._exchange.reply(response)


class StreamedResponse:
    """One event per chunk, as it comes.

    usage: whether the last event tells it.
    continuous: whether each one does, up to there.
    """

    def __init__(
        self, stream: EventStream, head: Head, shape: Shape, *, usage: bool, continuous: bool
    ) -> None:
        self._stream = stream
        self._shape = shape
        # The same in every event: written once, up to what differs.
        self._start = to_json(head.shape(shape.part, shape.prefix), ensure_ascii=True)[:-1]
        self._n = head.n
        self._wants_usage = usage
        self._is_continuous = usage and continuous
        self._usage = Usage()
        self._so_far = Usage()

    async def take(self, prompt: int, message: GenerateResponse) -> None:
        """Sends what it says to the client."""
        match message.WhichOneof("payload"):
            case "started":
                self._so_far.num_prompt_tokens += message.started.num_prompt_tokens
            case "chunk":
                await self._chunk(prompt, message.chunk)
            case "summary":
                _count(self._usage, message.summary)

    async def end(self) -> None:
        """The usage, if it is wanted, and the end."""
        if self._wants_usage:
            await self._stream.event(self._event("", self._usage))
        await self._stream.event(DONE)
        await self._stream.end()

    async def _chunk(self, prompt: int, chunk: inference_service_pb2.Chunk) -> None:
        self._so_far.num_output_tokens += len(chunk.token_ids)
        delta = self._shape.delta(prompt * self._n + chunk.index, chunk)
        if delta is None:
            return
        usage = self._so_far if self._is_continuous else None
        await self._stream.event(self._event(to_json(delta, ensure_ascii=True), usage))

    def _event(self, choice: str, usage: Usage | None) -> str:
        event = f'{self._start},"choices":[{choice}]'
        if self._wants_usage:
            told = "null" if usage is None else to_json(usage.shape(), ensure_ascii=True)
            event += f',"usage":{told}'
        return event + "}"
