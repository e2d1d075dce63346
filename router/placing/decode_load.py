"""This router's requests at one decode worker: what they hold, and what they will grow to.

A synchronous core.

Counted here, and not taken from the worker's reports, so that a burst that comes between two reports is
seen at once. What other routers have there is the report less what is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.limits import blocks_needed


@dataclass(slots=True)
class _Held:
    num_tokens: int
    expected_tokens: int
    num_local_tokens: int
    is_decoding: bool = False
    growth: int = 0


class DecodeLoad:
    """Requests placed at one worker, from placement to their end.

    num_tokens: in their caches.  num_growth_blocks: blocks they are expected to take yet.
    num_local_tokens: of prompts that the worker computes itself and has not yet.
    num_decoding, num_decoding_tokens: of those whose KV is there.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}
        self._block_size = 1
        self.num_tokens = 0
        self.num_growth_blocks = 0
        self.num_local_tokens = 0
        self.num_decoding = 0
        self.num_decoding_tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    def opened(self, block_size: int) -> None:
        """The worker said how many tokens its blocks have."""
        self._block_size = block_size

    def place(
        self, attempt_id: bytes, *, num_tokens: int, expected_tokens: int, num_local_tokens: int
    ) -> None:
        """A request goes there. num_local_tokens: what the worker is to compute of its prompt itself."""
        held = _Held(num_tokens, expected_tokens, num_local_tokens)
        self._held[attempt_id] = held
        self.num_tokens += num_tokens
        self.num_local_tokens += num_local_tokens
        self._regrow(held)

    def committed(self, attempt_id: bytes) -> None:
        """Its KV is there, or will be computed there. Idempotent."""
        held = self._held.get(attempt_id)
        if held is not None and not held.is_decoding:
            held.is_decoding = True
            self.num_decoding += 1
            self.num_decoding_tokens += held.num_tokens

    def prompt_computed(self, attempt_id: bytes) -> None:
        """The worker has computed its prompt. Idempotent."""
        held = self._held.get(attempt_id)
        if held is not None:
            self.num_local_tokens -= held.num_local_tokens
            held.num_local_tokens = 0

    def grew(self, attempt_id: bytes, num_tokens: int) -> None:
        """It got that many tokens."""
        held = self._held.get(attempt_id)
        if held is None:
            return
        was = held.num_tokens
        held.num_tokens += num_tokens
        self.num_tokens += num_tokens
        if held.is_decoding:
            self.num_decoding_tokens += num_tokens
        if was // self._block_size != held.num_tokens // self._block_size:
            self._regrow(held)

    def ended(self, attempt_id: bytes) -> None:
        """It is over there. Idempotent."""
        held = self._held.pop(attempt_id, None)
        if held is None:
            return
        self.num_tokens -= held.num_tokens
        self.num_local_tokens -= held.num_local_tokens
        self.num_growth_blocks -= held.growth
        if held.is_decoding:
            self.num_decoding -= 1
            self.num_decoding_tokens -= held.num_tokens

    def _regrow(self, held: _Held) -> None:
        size = self._block_size
        growth = blocks_needed(held.expected_tokens, size) - blocks_needed(held.num_tokens + 1, size)
        # An answer that is longer than expected may end any moment; it is not counted on.
        self.num_growth_blocks += max(0, growth) - held.growth
        held.growth = max(0, growth)
