"""One attempt inside a prefill worker: its request, its transfer, and how it came to an end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.logs import get_logger
from baton.ports import Session
from baton.telemetry import Span, start_span
from baton.v1.prefill_service_pb2 import (
    PrefillCommand,
    PrefillServiceSessionRequest,
    PrefillServiceSessionResponse,
)
from engine.failure_log import tell_nonfinite
from engine.request import Request
from engine.stored import Stored
from kvtransfer.contract import FirstToken, TransferTarget
from kvtransfer.sender import Transfer, TransferOutcome

log = get_logger(__name__)

RouterSession = Session[PrefillServiceSessionResponse, PrefillServiceSessionRequest]


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """What the worker holds for one PrefillCommand.

    request: owns its blocks while the attempt lives.
    request_id: the client's, for logs.
    num_kv_tokens: tokens whose KV the decode worker needs: all but the one to be sampled.
    ends_with_first_token: max_tokens leaves room for one only, so no KV needs to travel.
    cost: credit it spends, in tokens; 0 once restored.
    target: where the KV goes.
    arrived_at, sampled_at: when its command came, and when its token was sampled, in seconds of the event
        loop's clock.
    first_token: set when it is sampled.
    transfer: the open transfer, once there is something to send.
    result: how it ended.
    deadline: timer that ends the attempt, if the client set a deadline.
    """

    request: Request
    request_id: str
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
    sampled_at: float | None = None
    tail_s: float = 0.0
    result: TransferOutcome | None = None
    _untold: list[tuple[int, Stored]] = field(default_factory=list)

    @classmethod
    def of(
        cls, command: PrefillCommand, request: Request, session: RouterSession, session_id: int
    ) -> Attempt:
        """The attempt that a command asks for; its time here begins now. request: the command's sequence."""
        loop = asyncio.get_running_loop()
        sequence, target = command.sequence, command.target
        return cls(
            request=request,
            request_id=sequence.request_id,
            num_kv_tokens=request.num_tokens,
            ends_with_first_token=request.params.max_tokens == request.num_output_tokens + 1,
            session=session,
            session_id=session_id,
            cost=command.cost_tokens,
            target=TransferTarget(
                lease_id=target.lease_id,
                worker=target.worker,
                incarnation=target.incarnation,
                num_held_tokens=target.num_held_tokens,
            ),
            traceparent=sequence.traceparent,
            arrived_at=loop.time(),
            span=start_span(
                "PREFILLING",
                parent=sequence.traceparent,
                attributes={"baton.request_id": sequence.request_id, "baton.num_tokens": request.num_tokens},
            ),
            first_token=loop.create_future(),
        )

    def note_failure(self, error: BatonError) -> None:
        """Says in the span and in the log why it fails."""
        log.info("attempt ended", request_id=self.request_id, code=error.code, reason=error.message)
        tell_nonfinite(error, self.request_id)
        self.span.fail(error)

    @property
    def attempt_id(self) -> bytes:
        """Random 128 bits naming the attempt."""
        return self.request.attempt_id

    def begin(self, transfer: Transfer) -> None:
        """The transfer is open: tells it what is in the cache already."""
        self.transfer = transfer
        transfer.blocks_ready(self.request.num_computed_tokens)
        for num_layers, stored in self._untold:
            transfer.layers_ready(num_layers, stored)
        self._untold.clear()

    def layers_stored(self, num_layers: int, stored: Stored) -> None:
        """That many layers of the whole prompt are in the cache, once what `stored` says has happened."""
        if self.transfer is None:
            self._untold.append((num_layers, stored))
        else:
            self.transfer.layers_ready(num_layers, stored)
