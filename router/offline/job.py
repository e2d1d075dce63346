"""One request inside the simulated fleet: what it still needs, and when it got what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.offline.recording import RecordedRequest

if TYPE_CHECKING:
    from router.offline.simulated_worker import SimulatedWorker


@dataclass(slots=True, eq=False)
class Job:
    """A request and its progress. Moments are seconds of virtual time.

    prefill: computes the prompt; the decode worker itself where that does.
    num_computed: tokens of the prompt that are computed or were cached.
    compute_ms: its share of the steps that computed it, by tokens.
    """

    request: RecordedRequest
    prefill: SimulatedWorker
    decode: SimulatedWorker
    placed_at: float
    num_cached: int = 0
    num_computed: int = 0
    num_generated: int = 0
    compute_ms: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None

    @property
    def is_local(self) -> bool:
        """Whether the decode worker computes the prompt."""
        return self.prefill is self.decode

    @property
    def num_pending(self) -> int:
        """Tokens of the prompt that are not computed yet."""
        return self.request.num_prompt_tokens - self.num_computed

    @property
    def num_context(self) -> int:
        """Tokens in its cache."""
        return self.request.num_prompt_tokens + self.num_generated

    @property
    def num_left(self) -> int:
        """Tokens that it is still to get."""
        return self.request.num_output_tokens - self.num_generated
