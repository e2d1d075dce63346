"""One waiting request as the queue sees it. It knows neither tokens nor workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.v1 import common_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting(Generic[T]):
    """One waiting item; equal to itself only. Times are seconds on the caller's clock.

    num_tokens: tokens of prompt to compute, those that are cached left out.
    enqueued_at: when the request first came; how long it has waited follows from it.
    deadline_at: when its first token is due; infinite for whenever there is time.
    cost_ms: predicted prefill, in ms.
    weight: its tenant's share, against those of others.
    priority: low, normal or high.
    is_new: whether it was never placed; only then it may be shed.
    number: pushes before it; decides between equal times.
    """

    value: T
    num_tokens: int
    enqueued_at: float
    deadline_at: float
    cost_ms: float
    tenant: str = ""
    weight: float = 1.0
    priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_NORMAL
    is_new: bool = True
    number: int = 0

    @property
    def age_key(self) -> tuple[float, int]:
        """Sorts by time of arrival."""
        return (self.enqueued_at, self.number)

    @property
    def deadline_key(self) -> tuple[float, float, int]:
        """Sorts by deadline, equal ones by time of arrival."""
        return (self.deadline_at, self.enqueued_at, self.number)
