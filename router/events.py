"""What a worker can tell the generation that waits for it, and the inbox it arrives in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.errors import BatonError
from baton.v1 import common_pb2, decode_service_pb2, prefill_service_pb2


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The session with a worker of this attempt ended."""

    role: common_pb2.Role.ValueType
    error: BatonError


Event = (
    common_pb2.TokenEvent
    | common_pb2.AloneStep
    | prefill_service_pb2.PrefillEnded
    | decode_service_pb2.ReserveResult
    | decode_service_pb2.LeaseOutcome
    | decode_service_pb2.DecodeFailed
    | decode_service_pb2.Preempted
    | decode_service_pb2.PromptComputed
    | common_pb2.PromptLogprobs
    | LinkLost
)


class Inbox:
    """Events of one attempt, in order of arrival.

    Unbounded by type, bounded by protocol: an attempt has at most max_tokens
    token events and a handful of others. A closed inbox drops what still comes:
    the attempt is fenced.
    """

    def __init__(self, attempt_id: bytes) -> None:
        self.attempt_id = attempt_id
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._closed = False

    def put(self, event: Event) -> None:
        """Adds an event unless the attempt is fenced."""
        if not self._closed:
            self._events.put_nowait(event)

    async def get(self) -> Event:
        """The next event."""
        return await self._events.get()

    def close(self) -> None:
        """Fences the attempt."""
        self._closed = True
