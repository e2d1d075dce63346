"""When one request's tokens were computed, and what share of the steps that took.

A synchronous core: the step loop tells it, with times of the event loop's clock. It counts what is
computed to reach the request's tokens, not the tokens that are decoded after them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PromptTimes:
    """The steps that computed a part of a prompt.

    began_at: start of the first of them, in seconds of the loop's clock; None before.
    compute_s: their durations, each divided by tokens among all that it computed, in seconds.
    num_steps, num_tokens: steps that have ended, and tokens of the prompt that they computed.
    """

    began_at: float | None = None
    compute_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0

    def begin(self, now: float) -> None:
        """A step that computes a part of the prompt begins."""
        if self.began_at is None:
            self.began_at = now

    def add(self, num_tokens: int, share_s: float) -> None:
        """A step has computed num_tokens more; share_s of its time went into them."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.compute_s += share_s
