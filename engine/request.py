"""One request as the engine sees it, and the states it may pass through.

Owns: the tokens, the block table and the progress of one attempt. It must not
know sessions, leases or transports, and it holds no tensor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.prompt_times import PromptTimes
from engine.request_edits import RequestEdits

if TYPE_CHECKING:
    from baton.prefix_keys import PrefixKeys
    from baton.sampling import SamplingParams
    from engine.token_mask import TokenMask


class RequestStatus(enum.Enum):
    """Where a request stands; the names are also span names and metric labels."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended at the worker: a stop id, or its token limit."""

    STOP = "stop"
    LENGTH = "length"


# QUEUED -> PREFILLING -> TRANSFERRING -> DECODING -> FINISHED is the disaggregated path.
# PREFILLING -> DECODING is prefill and decode on one worker; -> QUEUED is resume, or a reservation whose
# worker computes the prompt itself; every living state may end.
ALLOWED: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.QUEUED: frozenset({RequestStatus.PREFILLING, RequestStatus.FINISHED}),
    RequestStatus.PREFILLING: frozenset(
        {RequestStatus.TRANSFERRING, RequestStatus.DECODING, RequestStatus.QUEUED, RequestStatus.FINISHED}
    ),
    RequestStatus.TRANSFERRING: frozenset(
        {RequestStatus.DECODING, RequestStatus.QUEUED, RequestStatus.FINISHED}
    ),
    RequestStatus.DECODING: frozenset({RequestStatus.QUEUED, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One attempt at one request. Mutable; owned by the event loop.

    attempt_id: 16 random bytes naming this attempt.
    token_ids: prompt and generated tokens, in order.
    num_prompt_tokens: how many of them the user sent; a resume keeps this.
    params: resolved sampling parameters.
    prefill_only: leaves the scheduler, with its blocks, once the next token is sampled.
    alone: it gets steps of its own, because workers died while it ran.
    sample_index: which of the n answers to one prompt this is; part of the random key.
    arrived_at: when its router got it, in seconds of the event loop's clock here; the oldest is never
        preempted.
    cache_salt: key of its prefix keys; requests share cached blocks only if theirs are equal.
    rope_step: scale step of the rotary embedding that all its tokens are computed at (docs/adr/0008).
    block_ids: blocks of the paged cache, in token order. Whoever holds the request owns them.
    num_cached_tokens: leading tokens that the prefix cache had when the request began.
    num_published_blocks: leading blocks that others can find.
    prefix_keys: keys of its full blocks, made when they are first needed.
    num_computed_tokens: leading tokens whose KV is stored. The KV of the last sampled
        token is stored by the next step, so a finished request has at most num_tokens - 1.
    mask: which tokens its grammar allows next; None allows all.
    times: how long the tokens it began with took to compute.
    edits: what its parameters do to logits; None if nothing.
    """

    attempt_id: bytes
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    prefill_only: bool = False
    alone: bool = False
    sample_index: int = 0
    arrived_at: float = 0.0
    cache_salt: bytes = b""
    rope_step: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_published_blocks: int = 0
    prefix_keys: PrefixKeys | None = None
    status: RequestStatus = RequestStatus.QUEUED
    finish_reason: FinishReason | None = None
    mask: TokenMask | None = None
    times: PromptTimes = field(default_factory=PromptTimes)
    edits: RequestEdits | None = field(init=False)

    def __post_init__(self) -> None:
        self.edits = RequestEdits.of(self.params, self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV is not stored yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Changes the status; raises ValueError for a transition that ALLOWED does not list."""
        if status not in ALLOWED[self.status]:
            raise ValueError(f"a request cannot go from {self.status.name} to {status.name}")
        self.status = status

    def rewind(self) -> None:
        """Back to where it waits for blocks, with the tokens it has: resuming it computes them again."""
        if self.status is not RequestStatus.QUEUED:
            self.move_to(RequestStatus.QUEUED)
        self.num_computed_tokens = self.num_cached_tokens = 0
        self.times = PromptTimes()

    def scale_to(self, rope_step: int) -> None:
        """From now on its tokens are computed at that scale step: cached KV of another one is not its own."""
        if rope_step != self.rope_step:
            self.rope_step = rope_step
            self.prefix_keys = None

    def finish(self, reason: FinishReason) -> None:
        """Ends the request for a reason the client is told."""
        self.move_to(RequestStatus.FINISHED)
        self.finish_reason = reason
