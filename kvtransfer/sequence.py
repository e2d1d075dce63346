"""Reads the Sequence message: the same request, as both workers schedule it.

The one place where the wire's form of a request becomes the engine's.
"""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.limits import Limits
from baton.prefix_keys import MAX_SALT_BYTES
from baton.sampling import SamplingParams
from baton.v1 import common_pb2
from engine.request import FinishReason, Request

FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def read_sequence(attempt_id: bytes, sequence: common_pb2.Sequence, limits: Limits, *, now: float) -> Request:
    """The request a command carries; raises InvalidRequest, naming the field, if the model cannot take it.

    now: loop time, in seconds.
    """
    if len(attempt_id) != 16:
        raise InvalidRequest("attempt_id must have 16 bytes", field="attempt_id")
    token_ids = list(sequence.token_ids)
    if not 1 <= sequence.num_prompt_tokens <= len(token_ids):
        raise InvalidRequest(
            f"num_prompt_tokens is {sequence.num_prompt_tokens} of {len(token_ids)} tokens",
            field="num_prompt_tokens",
        )
    params = SamplingParams.from_proto(sequence.sampling)
    params.check_vocab(limits.vocab_size)
    limits.check(token_ids[: sequence.num_prompt_tokens], params.max_tokens)
    if len(token_ids) - sequence.num_prompt_tokens >= params.max_tokens:
        raise InvalidRequest("the request has all its tokens already", field="token_ids")
    if max(token_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"token_ids has ids outside the vocabulary of {limits.vocab_size}", field="token_ids"
        )
    if len(sequence.cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has more than {MAX_SALT_BYTES} bytes", field="cache_salt")
    if sequence.rope_step != limits.rope_step(len(token_ids)):
        raise InvalidRequest(
            f"rope_step is {sequence.rope_step}; {len(token_ids)} tokens are computed at step "
            f"{limits.rope_step(len(token_ids))}",
            field="rope_step",
        )
    return Request(
        attempt_id,
        token_ids,
        sequence.num_prompt_tokens,
        params,
        alone=sequence.alone,
        sample_index=sequence.sample_index,
        arrived_at=now - sequence.age_ms / 1000,
        cache_salt=sequence.cache_salt,
        rope_step=sequence.rope_step,
    )
