"""What an answer looks like: the parts that the shapes of completions and chats share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from baton.v1 import common_pb2
from baton.v1.inference_service_pb2 import Chunk

FINISH_REASONS: Final = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class Usage:
    """Tokens of one request, over all of its prompts and answers."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None

    def shape(self) -> dict[str, Any]:
        """OpenAI's object. How many tokens were cached is known at the end only."""
        cached = self.num_cached_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }


@dataclass(slots=True)
class Collected:
    """One answer, as its chunks have come so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[common_pb2.TopLogprobs] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, chunk: Chunk) -> None:
        """Takes in the next chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs
        self.finish_reason = chunk.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of one prompt's tokens but the first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[common_pb2.TopLogprobs]


class Shape(Protocol):
    """How one endpoint writes answers.

    prefix: of the response's id.
    whole, part: names of the objects, of a response and of one event of a stream.
    """

    prefix: str
    whole: str
    part: str

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """An entry of `choices` in a stream; None where there is nothing to say yet."""

    def choice(self, index: int, answer: Collected) -> dict[str, Any]:
        """An entry of `choices` in a response."""

    def place_prompt(
        self, response: dict[str, Any], first_index: int, logprobs: list[dict[str, Any] | None]
    ) -> None:
        """Puts the prompt's log-probabilities into a response, whose choices from first_index on have it."""
