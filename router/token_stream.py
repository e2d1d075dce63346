"""Hands tokens from a generation to its client, merging what the client is too slow to take one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import InternalError
from baton.v1 import common_pb2


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens: the first has index start_index in the answer."""

    start_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[common_pb2.TopLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class PromptTokens:
    """Log-probabilities of consecutive prompt tokens: the first has index start_index in the prompt."""

    start_index: int
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[common_pb2.TopLogprobs] = field(default_factory=list)

    @property
    def end_index(self) -> int:
        """Index of the first prompt token that is still missing."""
        return self.start_index + len(self.logprobs)


class TokenStream:
    """One producer, one consumer.

    Holds at most the request's max_tokens ids, and its prompt's log-probabilities once, so it
    needs no other bound.

    start_index: index in the answer of the first token that will come.
    """

    def __init__(self, start_index: int = 0) -> None:
        self._waiting = Tokens(start_index=start_index)
        self._prompt = PromptTokens(start_index=1)
        self._ended = False
        self._change = asyncio.Event()

    @property
    def num_prompt_tokens(self) -> int:
        """Leading prompt tokens that need no log-probability any more: the first never has one."""
        return self._prompt.end_index

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[common_pb2.TopLogprobs] = (),
    ) -> None:
        """Adds tokens."""
        waiting = self._waiting
        waiting.token_ids += token_ids
        waiting.logprobs += logprobs
        waiting.top_logprobs += top_logprobs
        self._change.set()

    def push_prompt_logprobs(self, event: common_pb2.PromptLogprobs) -> None:
        """Adds log-probabilities of the prompt; what is known from an earlier attempt adds nothing."""
        known = self._prompt.end_index - event.start_index
        if known < 0:
            raise InternalError(f"log-probability {self._prompt.end_index} of the prompt is missing")
        if known >= len(event.logprobs):
            return
        self._prompt.logprobs += event.logprobs[known:]
        self._prompt.top_logprobs += event.top_logprobs[known:]
        self._change.set()

    def end(self) -> None:
        """No more tokens will come."""
        self._ended = True
        self._change.set()

    @property
    def has_more(self) -> bool:
        """Whether something waits already."""
        return bool(self._prompt.logprobs or self._waiting.token_ids)

    async def next(self) -> Tokens | PromptTokens | None:
        """All that came since the last call, the prompt's first, waiting for something; None at the end."""
        while not self.has_more:
            if self._ended:
                return None
            self._change.clear()
            await self._change.wait()
        if self._prompt.logprobs:
            prompt, self._prompt = self._prompt, PromptTokens(start_index=self._prompt.end_index)
            return prompt
        taken = self._waiting
        self._waiting = Tokens(start_index=taken.start_index + len(taken.token_ids))
        return taken
