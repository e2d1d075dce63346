"""Results of chunks, from arrays written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.errors import InvalidRequest, NonFiniteLogits
from baton.sampling import SamplingParams
from engine.batch import Scores, StepOutput, TopTokens
from engine.batch_builder import Chunk
from engine.request import Request
from engine.step_results import split_output
from tests.engine.tiny_models import make_request


def request(token_ids: list[int], **fields: Any) -> Request:
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__slots__}
    return make_request(token_ids, params=SamplingParams(**params), **fields)


def output(num_rows: int, **fields: Any) -> StepOutput:
    defaults: dict[str, Any] = {
        "step_id": 1,
        "token_ids": np.arange(num_rows) + 50,
        "logprobs": np.arange(num_rows, dtype=np.float32) / -4,
        "finite": np.ones(num_rows, np.bool_),
    }
    return StepOutput(**(defaults | fields))


def scores(num_rows: int, width: int, *, bad: int | None = None) -> Scores:
    finite = np.ones(num_rows, np.bool_)
    if bad is not None:
        finite[bad] = False
    return Scores(
        logprobs=np.arange(num_rows, dtype=np.float32) / -8,
        finite=finite,
        top=TopTokens(
            token_ids=np.arange(num_rows * width).reshape(num_rows, width),
            logprobs=np.arange(num_rows * width, dtype=np.float32).reshape(num_rows, width) / -16,
        ),
    )


def test_rows_find_their_chunks() -> None:
    partial = Chunk.of(request([1, 2, 3, 4]), 2)
    plain = Chunk.of(request([1, 2, 3]), 3)
    wanting = Chunk.of(request([5, 6], logprobs=True, top_logprobs=2), 2)
    top = TopTokens(token_ids=np.array([[7, 8, 9]] * 2), logprobs=np.array([[-0.5, -1, -2]] * 2, np.float32))

    nothing, first, second = split_output([partial, plain, wanting], output(2, top=top))

    assert (nothing.token, nothing.error) == (None, None)
    assert first.token == (50, 0.0, ())
    assert second.token == (51, -0.25, ((7, -0.5), (8, -1.0)))


def test_scores_find_their_chunks() -> None:
    # Two of three chunks score: tokens 3 and 4 of five, and tokens 1 and 2 of three, whose last samples.
    middle = Chunk.of(request([1, 2, 3, 4, 5], prompt_logprobs=1, num_computed_tokens=2), 2)
    plain = Chunk.of(request([1, 2, 3]), 3)
    whole = Chunk.of(request([4, 5, 6], prompt_logprobs=0), 3)

    first, second, third = split_output([middle, plain, whole], output(2, scores=scores(4, 2)))

    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs.start_index == 3
    assert first.prompt_logprobs.logprobs.tolist() == [0, -0.125]
    assert first.prompt_logprobs.top.token_ids.tolist() == [[0], [2]]
    assert second.prompt_logprobs is None
    assert third.prompt_logprobs is not None
    assert third.prompt_logprobs.start_index == 1
    assert third.prompt_logprobs.logprobs.tolist() == [-0.25, -0.375]
    assert third.prompt_logprobs.top.token_ids.shape == (2, 0)
    assert third.token is not None


def test_a_row_that_is_not_finite_ends_its_request_by_name() -> None:
    chunks = [Chunk.of(request([1]), 1) for _ in range(2)]
    broken = output(2, finite=np.array([True, False]), nonfinite_at={1: "layer 3 of 9, counted from 0"})

    healthy, failed = split_output(chunks, broken)

    assert healthy.error is None
    assert isinstance(failed.error, NonFiniteLogits)
    assert "layer 3 of 9" in failed.error.message


def test_without_the_search_the_error_says_how_to_get_it() -> None:
    (failed,) = split_output([Chunk.of(request([1]), 1)], output(1, finite=np.array([False])))

    assert isinstance(failed.error, NonFiniteLogits)
    assert "debug_nonfinite" in failed.error.message


def test_a_scored_row_that_is_not_finite_ends_the_request_too() -> None:
    chunk = Chunk.of(request([1, 2, 3, 4], prompt_logprobs=0), 2)

    (failed,) = split_output([chunk], output(0, scores=scores(2, 0, bad=1)))

    assert isinstance(failed.error, NonFiniteLogits)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": (3,)}, "allowed_token_ids"),
        ({"min_tokens": 2, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_a_blocked_row_names_what_blocks_it(fields: dict[str, Any], named: str) -> None:
    chunks = [Chunk.of(request([1]), 1), Chunk.of(request([1], **fields), 1)]

    _, failed = split_output(chunks, output(2, blocked=frozenset({1})))

    assert isinstance(failed.error, InvalidRequest)
    assert failed.error.field == named
    assert named in failed.error.message


def test_a_masks_error_is_the_requests() -> None:
    error = InvalidRequest("the grammar is too complex", field="grammar")

    (failed,) = split_output([Chunk.of(request([1]), 1)], output(1, mask_errors={0: error}))

    assert failed.error is error
    assert failed.token is None
