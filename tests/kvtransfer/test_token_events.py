"""Tokens and scores on the wire: exactly what was asked for, and as numbers that JSON can carry."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from baton.errors import InvalidRequest
from baton.sampling import SamplingParams
from baton.v1 import common_pb2
from engine.batch import TopTokens
from engine.logprobs import LOGPROB_FLOOR
from engine.request import FinishReason, Request
from engine.scheduler import TokenSampled
from engine.step_results import PromptLogprobs
from kvtransfer.contract import FirstToken
from kvtransfer.token_events import read_first_token, write_first_token, write_prompt_logprobs, write_token

A = b"A" * 16
TOP = ((9, -0.25), (3, -1.5))


def sampled(*, top: tuple[tuple[int, float], ...] = (), **params: Any) -> TokenSampled:
    request = Request(A, [5, 6, 9], 2, SamplingParams(**params))
    return TokenSampled(request, 9, -0.25, top)


def test_a_plain_token_carries_no_logprobs() -> None:
    event = write_token(sampled())

    assert (event.attempt_id, event.start_index, list(event.token_ids)) == (A, 0, [9])
    assert not event.logprobs
    assert not event.top_logprobs
    assert event.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED


def test_a_token_carries_what_was_asked_for() -> None:
    token = sampled(logprobs=True, top_logprobs=2, top=TOP)
    token.request.finish_reason = FinishReason.STOP

    event = write_token(token)

    assert list(event.logprobs) == [-0.25]
    (top,) = event.top_logprobs
    assert (list(top.token_ids), list(top.logprobs)) == ([9, 3], [-0.25, -1.5])
    assert event.finish_reason == common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    "token",
    [
        FirstToken(token_id=9, logprob=None, start_index=0),
        FirstToken(token_id=9, logprob=-0.25, start_index=4),
        FirstToken(token_id=9, logprob=-0.25, start_index=4, top=TOP),
    ],
)
def test_a_first_token_survives_the_handoff(token: FirstToken) -> None:
    data = write_first_token(A, token).SerializeToString()

    assert read_first_token(common_pb2.TokenEvent.FromString(data)) == token


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": []},
        {"token_ids": [1, 2]},
        {"token_ids": [1], "logprobs": [-1, -2]},
        {"token_ids": [1], "top_logprobs": [{"token_ids": [1], "logprobs": [-1]}] * 2},
        {"token_ids": [1], "top_logprobs": [{"token_ids": [1, 2], "logprobs": [-1]}]},
    ],
    ids=str,
)
def test_anything_but_one_first_token_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_first_token(common_pb2.TokenEvent(**fields))
    assert caught.value.field == "first_token"


def test_scores_of_a_chunk() -> None:
    top = TopTokens(token_ids=np.array([[4, 7], [8, 1]]), logprobs=np.array([[-1, -2], [-3, -4]], np.float32))
    scores = PromptLogprobs(start_index=17, logprobs=np.array([-0.5, -6], np.float32), top=top)

    message = write_prompt_logprobs(A, scores)

    assert (message.attempt_id, message.start_index, list(message.logprobs)) == (A, 17, [-0.5, -6])
    assert [list(entry.token_ids) for entry in message.top_logprobs] == [[4, 7], [8, 1]]
    assert [list(entry.logprobs) for entry in message.top_logprobs] == [[-1, -2], [-3, -4]]


def test_scores_without_likeliest_tokens_carry_none() -> None:
    top = TopTokens(token_ids=np.zeros((2, 0), np.int64), logprobs=np.zeros((2, 0), np.float32))

    message = write_prompt_logprobs(
        A, PromptLogprobs(start_index=1, logprobs=np.zeros(2, np.float32), top=top)
    )

    assert len(message.logprobs) == 2
    assert not message.top_logprobs


def test_the_floor_is_standard_json() -> None:
    event = write_token(sampled(logprobs=True, top_logprobs=1, top=((3, LOGPROB_FLOOR),)))

    (logprob,) = event.top_logprobs[0].logprobs
    assert json.loads(json.dumps(logprob, allow_nan=False)) == pytest.approx(-3.4028235e38)
