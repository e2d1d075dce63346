"""One attempt inside a decode worker, from its reservation to its last token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.errors import BatonError
from baton.ports import Session
from baton.telemetry import Span
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from engine.failure_log import tell_nonfinite
from engine.request import Request

RouterSession = Session[DecodeServiceSessionResponse, DecodeServiceSessionRequest]


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """What the worker holds for one ReserveCommand.

    request: owns its blocks from the commit on; before, the lease does.
    session: the router that asked.
    arrived_at: when its command came, in seconds of the event loop's clock.
    is_computing_prompt: this worker computes the prompt itself and is not done with it.
    span: DECODING, from the commit on.
    deadline: timer that ends the attempt, if the client set a deadline.
    """

    request: Request
    session: RouterSession
    request_id: str
    traceparent: str
    arrived_at: float
    is_computing_prompt: bool = False
    span: Span | None = None
    deadline: asyncio.TimerHandle | None = None

    def note_failure(self, error: BatonError) -> None:
        """Says in the span, and in the log where that is for the operator, why it fails."""
        tell_nonfinite(error, self.request_id)
        if self.span is not None:
            self.span.fail(error)

    @property
    def attempt_id(self) -> bytes:
        """Random 128 bits naming the attempt."""
        return self.request.attempt_id
