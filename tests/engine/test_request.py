"""The states of a request and its derived counts."""

from __future__ import annotations

import itertools

import pytest

from engine.request import FinishReason, RequestStatus
from tests.engine.tiny_models import make_request

S = RequestStatus

LEGAL = {
    (S.QUEUED, S.PREFILLING),
    (S.QUEUED, S.FINISHED),
    (S.PREFILLING, S.TRANSFERRING),
    (S.PREFILLING, S.DECODING),
    (S.PREFILLING, S.QUEUED),
    (S.PREFILLING, S.FINISHED),
    (S.TRANSFERRING, S.DECODING),
    (S.TRANSFERRING, S.QUEUED),
    (S.TRANSFERRING, S.FINISHED),
    (S.DECODING, S.QUEUED),
    (S.DECODING, S.FINISHED),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_exactly_the_legal_transitions_are_allowed(before: RequestStatus, after: RequestStatus) -> None:
    request = make_request([1, 2], status=before)

    if (before, after) in LEGAL:
        request.move_to(after)
        assert request.status is after
    else:
        with pytest.raises(ValueError, match=f"{before.name} to {after.name}"):
            request.move_to(after)
        assert request.status is before


def test_counts_follow_the_tokens() -> None:
    request = make_request([5, 6, 7, 8, 9], num_prompt_tokens=3, num_computed_tokens=4)

    assert (request.num_tokens, request.num_output_tokens, request.num_pending_tokens) == (5, 2, 1)


def test_finishing_records_the_reason() -> None:
    request = make_request([1], status=S.DECODING)

    request.finish(FinishReason.LENGTH)

    assert request.is_finished
    assert request.finish_reason is FinishReason.LENGTH
