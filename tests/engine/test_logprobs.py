"""Log-probabilities and the likeliest tokens, against fp64 and NumPy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logprobs import LOGPROB_FLOOR, RowLogprobs, likeliest, score


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=12, max_size=12), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_of_equally_likely_tokens_the_lowest_id_comes_first(rows: list[list[int]], count: int) -> None:
    expected = np.argsort(-np.array(rows), axis=1, kind="stable")[:, :count]

    assert likeliest(torch.tensor(rows, dtype=torch.float32), count).tolist() == expected.tolist()


def test_more_tokens_than_the_vocabulary_has_are_all() -> None:
    top = RowLogprobs(torch.tensor([[0.0, 2.0, 1.0]])).top(20)

    assert top.token_ids.tolist() == [[1, 2, 0]]
    assert np.exp(top.logprobs.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_scores_of_given_tokens() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(5)) * 4
    logits[3, 17] = torch.inf
    token_ids = torch.tensor([0, 299, 5, 6, 7])

    scores = score(logits, token_ids, 2)

    assert scores.finite.tolist() == [True, True, True, False, True]
    exact = torch.log_softmax(logits.double(), -1)
    for row in (0, 1, 2, 4):
        assert scores.logprobs[row] == pytest.approx(exact[row, token_ids[row]].item(), abs=1e-5)
        assert scores.top.token_ids[row].tolist() == exact[row].argsort(descending=True)[:2].tolist()


def test_what_fp32_cannot_hold_becomes_the_floor() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0]])

    logprobs = RowLogprobs(logits).of(torch.tensor([1]))

    assert logprobs.tolist() == [LOGPROB_FLOOR]
    assert pytest.approx(-3.4028235e38) == LOGPROB_FLOOR
    assert np.isfinite(logprobs).all()


def test_large_logits_lose_no_precision() -> None:
    logits = torch.tensor([[80.0, 79.5, 60.0]])

    logprobs = RowLogprobs(logits).of(torch.tensor([0]))

    exact = -np.log1p(np.exp(-0.5) + np.exp(-20.0))
    assert logprobs[0] == pytest.approx(exact, abs=1e-7)
