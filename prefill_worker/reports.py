"""What a prefill worker tells its routers, as messages: what it is and how busy, how attempts end, how
pairs and credit stand.

Owns the translation only.
"""

from __future__ import annotations

from baton.errors import BatonError, Cancelled
from baton.failure import to_failure
from baton.v1 import common_pb2, prefill_service_pb2
from baton.v1.prefill_service_pb2 import PrefillServiceSessionResponse
from engine.engine import Engine
from kvtransfer.contract import Pairing
from kvtransfer.prefill_times import write_prefill_times
from kvtransfer.sender import TransferOutcome
from prefill_worker.attempt import Attempt
from prefill_worker.credits import CreditChange
from prefill_worker.pairs import PairState


def capacity(engine: Engine, pid: int) -> PrefillServiceSessionResponse:
    """What the worker is; the second message of a session."""
    shape, config = engine.cache.shape, engine.scheduler.config
    message = prefill_service_pb2.PrefillCapacity(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        pid=pid,
        chunk_tokens=config.chunk_tokens,
        max_batch_tokens=config.max_batch_tokens,
    )
    return PrefillServiceSessionResponse(capacity=message)


def heartbeat(engine: Engine, *, is_wedged: bool, is_draining: bool) -> PrefillServiceSessionResponse:
    """How busy the worker is."""
    message = prefill_service_pb2.PrefillWorkerHeartbeat(
        num_free_blocks=engine.pool.num_free,
        num_running=engine.scheduler.num_running,
        num_waiting=engine.scheduler.num_waiting,
        is_wedged=is_wedged,
        is_draining=is_draining,
        num_backlog_tokens=engine.scheduler.num_backlog_tokens,
    )
    return PrefillServiceSessionResponse(heartbeat=message)


def credit(change: CreditChange, share_tokens: int) -> list[PrefillServiceSessionResponse]:
    """What one session hears of its credit.

    share_tokens: most credit one session can come to from now on.
    """
    messages = []
    if change.granted:
        grant = prefill_service_pb2.CreditGrant(tokens=change.granted, share_tokens=share_tokens)
        messages.append(PrefillServiceSessionResponse(credit_grant=grant))
    if change.reclaimed:
        reclaim = prefill_service_pb2.CreditReclaim(tokens=change.reclaimed, share_tokens=share_tokens)
        messages.append(PrefillServiceSessionResponse(credit_reclaim=reclaim))
    return messages


def ended(attempt: Attempt, error: BatonError | None) -> PrefillServiceSessionResponse:
    """The last event of an attempt."""
    message = prefill_service_pb2.PrefillEnded(
        attempt_id=attempt.attempt_id,
        prefill=write_prefill_times(
            attempt.request, arrived_at=attempt.arrived_at, sampled_at=attempt.sampled_at
        ),
        transfer_tail_ms=1000 * attempt.tail_s,
    )
    if attempt.result is not None:
        _write_result(message, attempt.result)
    if isinstance(error, Cancelled):
        message.cancelled = True
    elif error is not None:
        message.failure.CopyFrom(to_failure(error))
    elif attempt.request.is_finished:
        message.finished = True
    else:
        message.committed = True
    return PrefillServiceSessionResponse(ended=message)


def _write_result(message: prefill_service_pb2.PrefillEnded, result: TransferOutcome) -> None:
    message.transfer_ms = 1000 * result.duration_s
    message.transfer_bytes = result.num_bytes
    message.transfer_hidden_share = result.hidden_share
    times = message.transfer_times
    for name in times.DESCRIPTOR.fields_by_name:
        setattr(times, name, 1000 * getattr(result.times, name.removesuffix("ms") + "s"))


def pair_status(incarnation: int, state: PairState) -> PrefillServiceSessionResponse:
    """How it stands with a decode worker."""
    message = prefill_service_pb2.PairStatus(incarnation=incarnation)
    if isinstance(state, Pairing):
        message.transport, message.note = state.transport, state.note
    else:
        message.failure.CopyFrom(to_failure(state))
    return PrefillServiceSessionResponse(pair_status=message)


def alone_step(attempt_id: bytes, *, ended: bool) -> PrefillServiceSessionResponse:
    """A step that the attempt has to itself begins, or has ended."""
    return PrefillServiceSessionResponse(alone_step=common_pb2.AloneStep(attempt_id=attempt_id, ended=ended))
