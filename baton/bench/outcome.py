"""A request to send, and what became of it. Knows neither clocks nor clusters.

Latencies count from the moment a request was due, not from when it was sent, so that a client that falls
behind hides no queue (coordinated omission). In a closed loop both are the same moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request. at_s: when it is due, in seconds from the start; a closed loop does not look at it."""

    at_s: float
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request.

    due_s: when it was due, in seconds from the start.
    token_s: when each of its tokens arrived, in seconds after it was due.
    late_s: how long after it was due it was sent.
    failure: code of why it was not answered completely; "" if it was.
    detail: the same in words.
    """

    num_prompt_tokens: int
    max_tokens: int
    token_s: tuple[float, ...] = ()
    late_s: float = 0.0
    failure: str = ""
    detail: str = ""
    due_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens arrived."""
        return not self.failure and len(self.token_s) == self.max_tokens

    @property
    def ttft_s(self) -> float:
        """Until the first token; infinite without one."""
        return self.token_s[0] if self.token_s else math.inf

    @property
    def e2e_s(self) -> float:
        """Until the last token; infinite without one."""
        return self.token_s[-1] if self.token_s else math.inf

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next; tokens of one message have gaps of 0."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def mean_itl_s(self) -> float:
        """Mean of the gaps; 0 where there is none."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1) if self.token_s[1:] else 0.0
