"""This router's prompts at one prefill worker, from placement to their end: a synchronous core.

Counted here, and not taken from the worker's reports, so that a burst that comes between two reports is
seen at once. It knows neither credit nor messages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Prompt:
    num_tokens: int
    predicted_ms: float


class PrefillBacklog:
    """Prompts that wait or are computed at one worker, and the blocks that attempts hold there."""

    def __init__(self) -> None:
        # In order of placement; without those whose token was sampled.
        self._prompts: dict[bytes, _Prompt] = {}
        self._blocks: dict[bytes, int] = {}
        self._since = 0.0
        self.num_blocks = 0
        self.num_tokens = 0

    def place(
        self, attempt_id: bytes, *, num_tokens: int, num_blocks: int, predicted_ms: float, now: float
    ) -> None:
        """A prompt goes there. num_tokens: to compute; num_blocks: that it will hold."""
        if not self._prompts:
            self._since = now
        self._prompts[attempt_id] = _Prompt(num_tokens, predicted_ms)
        self._blocks[attempt_id] = num_blocks
        self.num_blocks += num_blocks
        self.num_tokens += num_tokens

    def computed(self, attempt_id: bytes, now: float) -> None:
        """Its token was sampled; it keeps its blocks. Idempotent."""
        prompt = self._prompts.pop(attempt_id, None)
        if prompt is not None:
            self.num_tokens -= prompt.num_tokens
            self._since = now

    def ended(self, attempt_id: bytes) -> None:
        """It holds nothing any more. Idempotent."""
        prompt = self._prompts.pop(attempt_id, None)
        if prompt is not None:
            # Of what others wait for nothing is done by it.
            self.num_tokens -= prompt.num_tokens
        self.num_blocks -= self._blocks.pop(attempt_id, 0)

    def work_ahead_ms(self, num_tokens: int, chunk_tokens: int, now: float) -> float:
        """Predicted computing that goes before a prompt of num_tokens, in milliseconds.

        A worker takes the shortest rest first, and a chunk of the oldest prompt: so all of the shorter ones
        and a chunk of one longer. What has passed since a prompt was last completed is done.
        """
        ahead_ms = longer_ms = 0.0
        for prompt in self._prompts.values():
            if prompt.num_tokens <= num_tokens:
                ahead_ms += prompt.predicted_ms
            elif not longer_ms:
                longer_ms = prompt.predicted_ms * min(1.0, chunk_tokens / prompt.num_tokens)
        done_ms = 1000 * (now - self._since) if self._prompts else 0.0
        return max(0.0, ahead_ms - done_ms) + longer_ms
