"""What a simulated worker takes and holds: its cost model, and the sizes that it states.

Numbers only. Knows no session and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

# Printable letters in every tokenizer that benchmarks use: ids from 2 on.
_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 2, 94


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCosts:
    """Milliseconds that simulated steps and transfers take; all 0 is a worker that only talks.

    A step with n prompt tokens takes prefill_step_ms + prefill_token_ms * n; one that decodes for m
    requests decode_step_ms + decode_request_ms * m; one that does both, the sum. transfer_ms +
    transfer_token_ms * n passes from a first token to the commit of its KV.
    """

    prefill_step_ms: float = 0.0
    prefill_token_ms: float = 0.0
    decode_step_ms: float = 0.0
    decode_request_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_token_ms: float = 0.0

    def step_ms(self, num_prompt_tokens: int, num_decoding: int) -> float:
        """One step."""
        prefill = self.prefill_step_ms + self.prefill_token_ms * num_prompt_tokens
        decode = self.decode_step_ms + self.decode_request_ms * num_decoding
        return (prefill if num_prompt_tokens else 0.0) + (decode if num_decoding else 0.0)

    def tail_ms(self, num_tokens: int) -> float:
        """From a prompt's first token to the commit of its KV."""
        return self.transfer_ms + self.transfer_token_ms * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSizes:
    """What a simulated worker has room for; as in the capacity messages of the session protocol."""

    num_blocks: int = 8_192
    block_size: int = 16
    credit_tokens: int = 16_384
    chunk_tokens: int = 512
    mixed_tokens: int = 256
    max_batch_tokens: int = 2_048
    max_running: int = 256
    kv_bytes_per_token: int = 23_040


def sim_token(position: int) -> int:
    """The token that every simulated worker puts at a position of a sequence."""
    return _FIRST_TOKEN_ID + position % _NUM_TOKEN_IDS
