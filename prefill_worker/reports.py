"""What a prefill worker tells its routers, as messages: how attempts end, and how pairs stand.

Owns the translation only.
"""

from __future__ import annotations

from baton.errors import BatonError, Cancelled, to_failure
from baton.v1 import prefill_service_pb2
from baton.v1.prefill_service_pb2 import PrefillServiceSessionResponse
from kvtransfer.contract import Pairing
from kvtransfer.sender import TransferOutcome
from prefill_worker.attempt import Attempt
from prefill_worker.pairs import PairState


def ended(attempt: Attempt, error: BatonError | None) -> PrefillServiceSessionResponse:
    """The last event of an attempt."""
    message = prefill_service_pb2.PrefillEnded(
        attempt_id=attempt.attempt_id,
        prefill_ms=1000 * attempt.prefill_s,
        transfer_tail_ms=1000 * attempt.tail_s,
        num_cached_tokens=attempt.request.num_cached_tokens,
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
