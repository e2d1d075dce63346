"""The one formula for what fits: used by the router's validation, by admission at
both workers and by the runner, so that they can never disagree.

Knows only integers; neither models nor caches.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from baton.errors import InvalidRequest, PromptTooLong


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one model can take.

    max_model_len: most tokens of prompt plus answer; the last generated token
        needs no KV, so a prompt may use all but one of them.
    vocab_size: token ids are below it.
    rope_steps: rising lengths up to which each scale of the rotary embedding serves; () if it has one
        scale only (baton/rope_config.py).
    """

    max_model_len: int
    vocab_size: int
    rope_steps: tuple[int, ...] = ()

    def rope_step(self, num_tokens: int) -> int:
        """Scale step that a sequence of so many tokens is computed at, all its tokens alike.

        Tokens 0 .. n - 1 are computed at rope_step(n) before token n is sampled, so token n hangs on the
        tokens before it alone, whoever computes it and when.
        """
        return bisect_left(self.rope_steps, num_tokens)

    def rope_border(self, num_tokens: int) -> int:
        """Most tokens that a sequence of so many can come to at its scale step: one more outgrows it."""
        return self.rope_steps[self.rope_step(num_tokens)] if self.rope_steps else self.max_model_len

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens that can be generated after a prompt of that length."""
        return self.max_model_len - num_prompt_tokens

    def kv_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Most tokens of one request whose KV is ever stored: all but the last generated."""
        return num_prompt_tokens + max_tokens - 1

    def check(self, prompt_token_ids: list[int], max_tokens: int) -> None:
        """Raises InvalidRequest, naming the field, unless the request fits."""
        num_prompt_tokens = len(prompt_token_ids)
        self.check_length(num_prompt_tokens)
        if max(prompt_token_ids) >= self.vocab_size or min(prompt_token_ids) < 0:
            raise InvalidRequest(
                f"the prompt has token ids outside the vocabulary of {self.vocab_size}", field="token_ids"
            )
        if not 1 <= max_tokens <= self.max_output_tokens(num_prompt_tokens):
            raise InvalidRequest(
                f"max_tokens is {max_tokens}; with {num_prompt_tokens} prompt tokens it must be between 1 "
                f"and {self.max_output_tokens(num_prompt_tokens)}",
                field="max_tokens",
            )

    def check_length(self, num_prompt_tokens: int) -> None:
        """Raises InvalidRequest unless a prompt of that length fits."""
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty; send at least one token", field="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens; this model takes at most "
                f"{self.max_model_len - 1} and needs room for one more",
                field="prompt",
            )
