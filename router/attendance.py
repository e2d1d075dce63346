"""Which workers a router met, and when each was last there; remembered beyond the link to it.

A synchronous core: time comes in as an argument. Knows of a worker only who it is, how much it holds, and
whether it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import common_pb2

# Of those that have gone, the last ones are kept.
MAX_GONE = 1000


class Worker(Protocol):
    """router/link.py, or a test's own."""

    @property
    def role(self) -> common_pb2.Role.ValueType:
        """Its role."""

    @property
    def incarnation(self) -> int:
        """The process it is."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""

    @property
    def is_alive(self) -> bool:
        """Whether there is a session with that process, or it has left as it said."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that its cache holds."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """is_ready: whether it takes requests now.  ready_at, alive_at: when it was so last."""

    role: common_pb2.Role.ValueType
    alive_at: float
    num_kv_tokens: int = 0
    is_ready: bool = False
    ready_at: float | None = None


class Attendance:
    """Workers by incarnation."""

    def __init__(self, max_gone: int = MAX_GONE) -> None:
        self._max_gone = max_gone
        self._seen: dict[int, _Seen] = {}

    def take(self, workers: Iterable[Worker], now: float) -> None:
        """Notes who is there. To be called whenever that may have changed."""
        present = {worker.incarnation: worker for worker in workers if worker.is_alive}
        for incarnation, worker in present.items():
            # The latest come last.
            seen = self._seen.pop(incarnation, None) or _Seen(role=worker.role, alive_at=now)
            self._seen[incarnation] = seen
            seen.alive_at = now
        for incarnation, seen in self._seen.items():
            was_ready, seen.is_ready = seen.is_ready, False
            if (here := present.get(incarnation)) is not None and here.is_ready:
                seen.is_ready, seen.num_kv_tokens = True, here.num_kv_tokens
            if was_ready or seen.is_ready:
                seen.ready_at = now
        while len(self._seen) > len(present) + self._max_gone:
            del self._seen[next(iter(self._seen))]

    def was_alive_after(self, incarnation: int, at: float) -> bool:
        """Whether that very process was there at a later time."""
        seen = self._seen.get(incarnation)
        return seen is not None and seen.alive_at > at

    def went_at(self, role: common_pb2.Role.ValueType, num_tokens: int) -> float | None:
        """When the last of the workers that held so many tokens ceased to take requests; None if none did."""
        return max(
            (
                seen.ready_at
                for seen in self._seen.values()
                if seen.role == role
                and seen.num_kv_tokens >= num_tokens
                and seen.ready_at is not None
                and not seen.is_ready
            ),
            default=None,
        )
