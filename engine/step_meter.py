"""Measures steps: what each computed, how long it took, and whose time that was.

A synchronous core: time comes in as an argument, in seconds of the event loop's clock. It looks at
requests only while a step begins, because one that is removed may change before the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.request import RequestStatus

if TYPE_CHECKING:
    from engine.batch_builder import Chunk
    from engine.prompt_times import PromptTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What one step computed.

    duration_s: from its start to its end.
    num_decoding: requests that decoded a token.  num_context_tokens: what those attended to: the tokens
        in their caches, the ones of this step included.
    num_prompt_tokens: tokens of prompts computed beside them.
    """

    duration_s: float
    num_decoding: int
    num_context_tokens: int
    num_prompt_tokens: int


class StepMeter:
    """The step under way. begin() and end() take turns."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._num_decoding = 0
        self._num_context_tokens = 0
        # Of each prompt in the step: its times, and how many of its tokens the step computes.
        self._prompts: list[tuple[PromptTimes, int]] = []

    def begin(self, chunks: Sequence[Chunk], now: float) -> None:
        """A step of these chunks begins."""
        decoding = [c for c in chunks if c.request.status is RequestStatus.DECODING]
        self._began_at = now
        self._num_decoding = len(decoding)
        self._num_context_tokens = sum(c.request.num_computed_tokens + c.num_tokens for c in decoding)
        self._prompts = [
            (chunk.request.times, chunk.num_tokens)
            for chunk in chunks
            if chunk.request.status is not RequestStatus.DECODING
        ]
        for times, _ in self._prompts:
            times.begin(now)

    def end(self, now: float) -> StepLoad:
        """The step has ended: its prompts get their shares of its time."""
        duration_s = now - self._began_at
        num_prompt_tokens = sum(num_tokens for _, num_tokens in self._prompts)
        # A decoding request computes one token.
        num_tokens_in_all = self._num_decoding + num_prompt_tokens
        for times, num_tokens in self._prompts:
            times.add(num_tokens, duration_s * num_tokens / num_tokens_in_all)
        return StepLoad(
            duration_s=duration_s,
            num_decoding=self._num_decoding,
            num_context_tokens=self._num_context_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )
