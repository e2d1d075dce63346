"""Answers as POST /v1/completions writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.v1.inference_service_pb2 import Chunk
from router.http.answers import FINISH_REASONS, Collected
from router.http.logprobs import LogprobShapes, Offsets


class CompletionShape:
    """Of one request.

    logprobs: None where none are asked for.
    offsets: makes what counts the characters of one answer.
    with_ids: token ids are shown as well.
    """

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, logprobs: LogprobShapes | None, offsets: Callable[[], Offsets], *, with_ids: bool
    ) -> None:
        self._logprobs = logprobs
        self._make_offsets = offsets
        self._with_ids = with_ids
        self._offsets: dict[int, Offsets] = {}

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """An entry of `choices` in a stream."""
        part = Collected()
        part.add(chunk)
        return self.choice(index, part)

    def choice(self, index: int, answer: Collected) -> dict[str, Any]:
        """An entry of `choices` in a response."""
        choice: dict[str, Any] = {
            "index": index,
            "text": answer.text,
            "logprobs": self._shaped(index, answer),
            "finish_reason": FINISH_REASONS[answer.finish_reason],
        }
        if self._with_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def place_prompt(
        self, response: dict[str, Any], first_index: int, logprobs: list[dict[str, Any] | None]
    ) -> None:
        """Into the first answer to the prompt, as vLLM does."""
        response["choices"][first_index]["prompt_logprobs"] = logprobs

    def _shaped(self, index: int, answer: Collected) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        if index not in self._offsets:
            self._offsets[index] = self._make_offsets()
        places = self._offsets[index].push(answer.token_ids)
        return self._logprobs.of_completion(answer.token_ids, answer.logprobs, answer.top_logprobs, places)
