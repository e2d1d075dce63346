"""Answers as POST /v1/chat/completions writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.v1.inference_service_pb2 import Chunk
from router.http.answers import FINISH_REASONS, Collected
from router.http.logprobs import LogprobShapes
from router.tool_calls import CallDelta, ContentDelta, ToolCallParser

Deltas = Sequence[ContentDelta | CallDelta]


class ChatShape:
    """Of one request.

    logprobs: None where none are asked for.
    parser: makes what finds the tool calls in one answer; None where no tools were given.
    with_ids: token ids are shown as well.
    """

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        logprobs: LogprobShapes | None,
        parser: Callable[[], ToolCallParser] | None,
        *,
        with_ids: bool,
    ) -> None:
        self._logprobs = logprobs
        self._make_parser = parser
        self._with_ids = with_ids
        self._parsers: dict[int, ToolCallParser] = {}
        self._begun: set[int] = set()
        # Of each answer: tokens whose text may still become a call. They go out with the next event.
        self._held: dict[int, Collected] = {}
        self._callers: set[int] = set()

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """An entry of `choices` in a stream; None while text may still become a call."""
        content, calls = self._read(index, chunk.text, is_last=bool(chunk.finish_reason))
        part = self._held.pop(index, None) or Collected()
        part.add(chunk)
        is_first = index not in self._begun
        if not (content or calls or chunk.finish_reason or self._make_parser is None):
            self._held[index] = part
            return None
        self._begun.add(index)
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if content or not calls:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = _joined(calls)
        return {"index": index, "delta": delta, **self._rest(index, part)}

    def choice(self, index: int, answer: Collected) -> dict[str, Any]:
        """An entry of `choices` in a response."""
        content, parts = self._read(index, answer.text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parts:
            message["content"] = content or None
            calls = _joined(parts)
            message["tool_calls"] = [
                {name: call[name] for name in ("id", "type", "function")} for call in calls
            ]
        return {"index": index, "message": message, **self._rest(index, answer)}

    def place_prompt(
        self, response: dict[str, Any], first_index: int, logprobs: list[dict[str, Any] | None]
    ) -> None:
        """Beside the choices: a chat has one prompt."""
        del first_index
        response["prompt_logprobs"] = logprobs

    def _rest(self, index: int, answer: Collected) -> dict[str, Any]:
        shaped = None
        if self._logprobs is not None:
            shaped = self._logprobs.of_chat(answer.token_ids, answer.logprobs, answer.top_logprobs)
        reason = FINISH_REASONS[answer.finish_reason]
        if reason == "stop" and index in self._callers:
            reason = "tool_calls"
        rest = {"logprobs": shaped, "finish_reason": reason}
        return rest | {"token_ids": answer.token_ids} if self._with_ids else rest

    def _read(self, index: int, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The content and the parts of calls in the next piece of an answer's text."""
        if self._make_parser is None:
            return text, []
        if index not in self._parsers:
            self._parsers[index] = self._make_parser()
        parser = self._parsers[index]
        deltas: Deltas = [*parser.push(text), *(parser.flush() if is_last else ())]
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        calls = [_call(delta) for delta in deltas if isinstance(delta, CallDelta)]
        if calls:
            self._callers.add(index)
        return content, calls


def _call(delta: CallDelta) -> dict[str, Any]:
    """The beginning of a call, which has its name, or a part of its arguments."""
    if delta.name:
        function = {"name": delta.name, "arguments": delta.arguments}
        return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per call: clients take a second one of the same event for another call."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part["index"], part)
        if call is not part:
            call["function"]["arguments"] += part["function"]["arguments"]
    return [*calls.values()]
