"""What a decode worker tells its routers, as messages: what it is, how busy, and what becomes of attempts.

Owns the translation only.
"""

from __future__ import annotations

from baton.errors import BatonError
from baton.failure import to_failure
from baton.v1 import common_pb2, decode_service_pb2
from baton.v1.decode_service_pb2 import DecodeServiceSessionResponse
from decode_worker.attempt import Attempt
from engine.engine import Engine
from engine.step_meter import StepLoad
from engine.step_results import PromptLogprobs
from kvtransfer.contract import Committed, Outcome
from kvtransfer.prefill_times import write_prefill_times
from kvtransfer.token_events import write_prompt_logprobs
from kvtransfer.transports.grpc_codec import to_wire_reason


def capacity(engine: Engine, *, transfer_address: str, pid: int) -> DecodeServiceSessionResponse:
    """What the worker is; the second message of a session."""
    shape, config = engine.cache.shape, engine.scheduler.config
    message = decode_service_pb2.DecodeCapacity(
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        transfer_address=transfer_address,
        pid=pid,
        mixed_tokens=config.mixed_tokens,
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        max_batch_tokens=config.max_batch_tokens,
    )
    return DecodeServiceSessionResponse(capacity=message)


def num_reservable_blocks(engine: Engine) -> int:
    """Blocks that can be reserved now: running requests keep what they grow into."""
    return max(0, engine.pool.num_free - engine.scheduler.num_growth_blocks)


def heartbeat(
    engine: Engine, *, num_leases: int, num_saturated_values: int, is_wedged: bool, is_draining: bool
) -> DecodeServiceSessionResponse:
    """How busy the worker is.

    num_leases: those whose KV has not been committed. num_saturated_values: see kvtransfer/saturation.py.
    """
    message = decode_service_pb2.DecodeWorkerHeartbeat(
        num_free_blocks=num_reservable_blocks(engine),
        num_running=engine.scheduler.num_running,
        num_leases=num_leases,
        is_wedged=is_wedged,
        is_draining=is_draining,
        num_context_tokens=engine.scheduler.num_context_tokens,
        num_backlog_tokens=engine.scheduler.num_backlog_tokens,
        num_saturated_values=num_saturated_values,
    )
    return DecodeServiceSessionResponse(heartbeat=message)


def step_events(
    tokens: list[common_pb2.TokenEvent], *, num_free_blocks: int, load: StepLoad | None
) -> DecodeServiceSessionResponse:
    """One router's tokens. load: of the step that sampled them; None if they were sampled elsewhere."""
    message = decode_service_pb2.StepEvents(tokens=tokens, num_free_blocks=num_free_blocks)
    if load is not None:
        message.load.duration_ms = 1000 * load.duration_s
        message.load.num_decoding = load.num_decoding
        message.load.num_context_tokens = load.num_context_tokens
        message.load.num_prompt_tokens = load.num_prompt_tokens
    return DecodeServiceSessionResponse(step=message)


def prompt_computed(attempt: Attempt, sampled_at: float) -> DecodeServiceSessionResponse:
    """A prompt that this worker computed itself is complete; its first token follows."""
    message = decode_service_pb2.PromptComputed(
        attempt_id=attempt.attempt_id,
        prefill=write_prefill_times(attempt.request, arrived_at=attempt.arrived_at, sampled_at=sampled_at),
    )
    return DecodeServiceSessionResponse(prompt_computed=message)


def prompt_scores(attempt: Attempt, scores: PromptLogprobs) -> DecodeServiceSessionResponse:
    """Log-probabilities of a prompt that this worker computes itself."""
    return DecodeServiceSessionResponse(prompt_logprobs=write_prompt_logprobs(attempt.attempt_id, scores))


def lease_outcome(attempt_id: bytes, outcome: Outcome) -> DecodeServiceSessionResponse:
    """What the arbiter has decided about an attempt's KV."""
    message = decode_service_pb2.LeaseOutcome(attempt_id=attempt_id)
    if isinstance(outcome, Committed):
        message.committed = True
    else:
        message.gone = to_wire_reason(outcome.reason)
    return DecodeServiceSessionResponse(lease_outcome=message)


def alone_step(attempt_id: bytes, *, ended: bool) -> DecodeServiceSessionResponse:
    """A step that the attempt has to itself begins, or has ended."""
    return DecodeServiceSessionResponse(alone_step=common_pb2.AloneStep(attempt_id=attempt_id, ended=ended))


def preempted(attempt_id: bytes, *, outgrown: bool) -> DecodeServiceSessionResponse:
    """The attempt has ended because others needed its blocks, or because it has outgrown its scale step."""
    message = decode_service_pb2.Preempted(attempt_id=attempt_id, outgrown=outgrown)
    return DecodeServiceSessionResponse(preempted=message)


def failed(attempt_id: bytes, error: BatonError) -> DecodeServiceSessionResponse:
    """The attempt has ended with an error."""
    message = decode_service_pb2.DecodeFailed(attempt_id=attempt_id, failure=to_failure(error))
    return DecodeServiceSessionResponse(failed=message)
