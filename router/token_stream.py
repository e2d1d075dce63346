"""Hands tokens from a generation to its client, merging what the client is too slow to take one by one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens: the first has index start_index in the answer."""

    start_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TokenStream:
    """One producer, one consumer. Holds at most the request's max_tokens ids, so it needs no other bound.

    start_index: index in the answer of the first token that will come.
    """

    def __init__(self, start_index: int = 0) -> None:
        self._waiting = Tokens(start_index=start_index)
        self._ended = False
        self._change = asyncio.Event()

    def push(self, token_ids: list[int], logprobs: list[float]) -> None:
        """Adds tokens."""
        self._waiting.token_ids += token_ids
        self._waiting.logprobs += logprobs
        self._change.set()

    def end(self) -> None:
        """No more tokens will come."""
        self._ended = True
        self._change.set()

    async def next(self) -> Tokens | None:
        """All tokens that came since the last call, waiting for at least one; None at the end."""
        while not self._waiting.token_ids:
            if self._ended:
                return None
            self._change.clear()
            await self._change.wait()
        taken = self._waiting
        self._waiting = Tokens(start_index=taken.start_index + len(taken.token_ids))
        return taken
