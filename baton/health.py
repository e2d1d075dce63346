"""What a worker says of itself: whether it takes requests, whether it makes progress, and how busy it is.

Values only. They are measured by the workers, and read by the health service and by whoever places workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """How a worker is.

    is_ready: it takes requests.
    is_alive: it makes progress, or has nothing to do; what is not alive is of no more use.
    reason: why it is not ready or not alive, for people; empty if it is both.
    """

    is_ready: bool
    is_alive: bool
    reason: str = ""

    @classmethod
    def of(cls, *complaints: str, is_alive: bool) -> Self:
        """Of a worker that is ready unless something is to be complained of; empty strings are not."""
        reason = next(filter(None, complaints), "")
        return cls(is_ready=not reason, is_alive=is_alive, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """How busy a worker is.

    num_attempts: attempts of all routers.
    num_running, num_waiting: requests in the batch, and in front of it.
    num_free_blocks, num_blocks: KV blocks that nobody uses, and all.
    """

    num_attempts: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
