"""What becomes of requests in a step, and between two steps, as the scheduler tells it.

Owns the words only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.errors import BatonError
    from engine.request import Request
    from engine.step_results import PromptLogprobs


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """A part of a prompt was computed; nothing was sampled. The request stays.

    prompt_logprobs: of the prompt tokens after those computed; None unless the request wants them.
    """

    request: Request
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """A token was sampled and appended. A finished or prefill_only request has left, with its blocks.

    logprob: 0 unless the request wants it.  top: (token id, logprob) of the likeliest tokens, likeliest
        first; empty unless the request wants them.  prompt_logprobs: as in ChunkComputed.
    """

    request: Request
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request has left, with its blocks, because of an error of its own."""

    request: Request
    error: BatonError


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request gave its blocks back and has left without them. It is QUEUED: add() resumes it.

    outgrown: it has become too long for its scale step; move it to the one of its length before add().
        Otherwise older requests needed its blocks.
    """

    request: Request
    outgrown: bool = False


Event = ChunkComputed | TokenSampled | RequestFailed | Preempted
