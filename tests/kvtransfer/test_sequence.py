"""The Sequence message as the engine's request: exact for what fits, refused by field for what does not."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.limits import Limits
from baton.sampling import SamplingParams
from baton.v1 import common_pb2
from engine.request import FinishReason, RequestStatus
from kvtransfer.sequence import FINISH_REASONS, read_sequence

ATTEMPT = bytes(range(16))
LIMITS = Limits(max_model_len=32, vocab_size=100)


def message(token_ids: list[int], num_prompt_tokens: int | None = None, **params: Any) -> common_pb2.Sequence:
    sampling = SamplingParams(**({"max_tokens": 8} | params)).to_proto()
    return common_pb2.Sequence(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=sampling,
    )


def test_a_new_request() -> None:
    sequence = message(
        [5, 6, 7], temperature=0.5, top_k=3, seed=2**64 - 1, stop_token_ids=(9,), logprobs=True
    )
    request = read_sequence(
        ATTEMPT, common_pb2.Sequence.FromString(sequence.SerializeToString()), LIMITS, now=0.0
    )
    assert (request.attempt_id, request.token_ids, request.num_prompt_tokens) == (ATTEMPT, [5, 6, 7], 3)
    assert request.params == SamplingParams(
        temperature=0.5, top_k=3, seed=2**64 - 1, max_tokens=8, stop_token_ids=(9,), logprobs=True
    )
    assert (request.num_computed_tokens, request.block_ids) == (0, [])
    assert request.status is RequestStatus.QUEUED
    assert not request.prefill_only


def test_a_resumed_request_keeps_its_prompt() -> None:
    request = read_sequence(ATTEMPT, message([5, 6, 7, 50, 51], 3), LIMITS, now=0.0)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 2)


@pytest.mark.parametrize(("num_tokens", "step"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (24, 2)], ids=str)
def test_the_scale_step_is_that_of_its_length(num_tokens: int, step: int) -> None:
    limits = Limits(max_model_len=32, vocab_size=100, rope_steps=(8, 16, 32))
    for said in range(4):
        sequence = message([1] * num_tokens)
        sequence.rope_step = said
        if said == step:
            assert read_sequence(ATTEMPT, sequence, limits, now=0.0).rope_step == step
            continue
        with pytest.raises(InvalidRequest, match=f"{num_tokens} tokens are computed at step {step}") as error:
            read_sequence(ATTEMPT, sequence, limits, now=0.0)
        assert error.value.field == "rope_step"


def test_the_largest_request_fits_exactly() -> None:
    assert read_sequence(ATTEMPT, message([1] * 24, max_tokens=8), LIMITS, now=0.0).num_tokens == 24
    assert read_sequence(ATTEMPT, message([1] * 31, 24, max_tokens=8), LIMITS, now=0.0).num_output_tokens == 7


@pytest.mark.parametrize(
    ("sequence", "field"),
    [
        (message([]), "num_prompt_tokens"),
        (message([1, 2], 3), "num_prompt_tokens"),
        (message([1, 2], 0), "num_prompt_tokens"),
        (message([1] * 25, max_tokens=8), "max_tokens"),
        (message([1] * 32, max_tokens=1), "prompt"),
        (message([1, 100]), "token_ids"),
        (message([1, 99, 100], 2), "token_ids"),
        (message([1, 2, 3, 4], 2, max_tokens=2), "token_ids"),
    ],
    ids=["empty", "more prompt than tokens", "no prompt", "too much to come", "no room", "prompt id",
         "output id", "complete already"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_field(sequence: common_pb2.Sequence, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_sequence(ATTEMPT, sequence, LIMITS, now=0.0)
    assert error.value.field == field


@pytest.mark.parametrize("attempt_id", [b"", b"x" * 15, b"x" * 17])
def test_an_attempt_id_has_sixteen_bytes(attempt_id: bytes) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_sequence(attempt_id, message([1]), LIMITS, now=0.0)
    assert error.value.field == "attempt_id"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", float("nan")), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.5),
     ("max_tokens", 0)],
)  # fmt: skip
def test_a_sampling_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    sequence = message([1])
    setattr(sequence.sampling, name, value)
    with pytest.raises(InvalidRequest) as error:
        read_sequence(ATTEMPT, sequence, LIMITS, now=0.0)
    assert error.value.field == name


def test_every_finish_reason_has_its_wire_value() -> None:
    assert set(FINISH_REASONS) == {None, *FinishReason}
    assert FINISH_REASONS[FinishReason.STOP] == common_pb2.FINISH_REASON_STOP
    assert FINISH_REASONS[FinishReason.LENGTH] == common_pb2.FINISH_REASON_LENGTH
    assert FINISH_REASONS[None] == common_pb2.FINISH_REASON_UNSPECIFIED


def test_a_salt_that_is_no_key_is_refused() -> None:
    sequence = message([1])
    sequence.cache_salt = b"x" * 64
    assert read_sequence(ATTEMPT, sequence, LIMITS, now=0.0).cache_salt == b"x" * 64
    sequence.cache_salt += b"x"
    with pytest.raises(InvalidRequest) as error:
        read_sequence(ATTEMPT, sequence, LIMITS, now=0.0)
    assert error.value.field == "cache_salt"
