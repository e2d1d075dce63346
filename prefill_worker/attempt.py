"""One attempt inside a prefill worker: its request, its transfer, and how it came to an end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.ports import Session
from baton.telemetry import Span
from baton.v1.prefill_service_pb2 import (
    PrefillServiceSessionRequest,
    PrefillServiceSessionResponse,
)
from engine.request import Request
from kvtransfer.contract import FirstToken, TransferTarget
from kvtransfer.sender import Transfer

RouterSession = Session[PrefillServiceSessionResponse, PrefillServiceSessionRequest]


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """What the worker holds for one PrefillCommand.

    request: owns its blocks while the attempt lives.
    num_kv_tokens: tokens whose KV the decode worker needs: all but the one to be sampled.
    ends_with_first_token: max_tokens leaves room for one only, so no KV needs to travel.
    cost: credit it spends, in tokens; 0 once restored.
    target: where the KV goes.
    first_token: set when it is sampled.
    transfer: the open transfer, once the first chunk is computed.
    deadline: timer that ends the attempt, if the client set a deadline.
    """

    request: Request
    num_kv_tokens: int
    ends_with_first_token: bool
    session: RouterSession
    session_id: int
    cost: int
    target: TransferTarget
    traceparent: str
    arrived_at: float
    span: Span
    first_token: asyncio.Future[FirstToken]
    transfer: Transfer | None = None
    task: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    tail_s: float = 0.0
    transfer_bytes: int = 0

    @property
    def attempt_id(self) -> bytes:
        """Random 128 bits naming the attempt."""
        return self.request.attempt_id
