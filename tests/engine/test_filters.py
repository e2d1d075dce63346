"""The filters against transformers' processors, and the sets of case B37."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.sampling import SamplingParams
from engine.filters import survivors
from engine.sampler import sample
from tests.engine.sampling_arrays import arrays
from tests.sampling_oracle import TIE, filtered

MOST_GUMBEL = -math.log(-math.log1p(-(2.0**-24)))
LEAST_GUMBEL = -math.log(24 * math.log(2))


def kept(scaled: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> torch.Tensor:
    """What survives, [R, V]; checks the numbers of survivors too."""
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    columns = torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)
    kept_RV, num_kept_R = survivors(scaled, *columns)
    assert kept_RV.sum(dim=-1).tolist() == num_kept_R.tolist()
    return kept_RV


def reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """What transformers keeps of rows of logits, less what no Gumbel number can make win."""
    # As parameters arrive: in fp32.
    top_p, min_p = float(np.float32(top_p)), float(np.float32(min_p))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = filtered(logits, params)
    return scores >= LEAST_GUMBEL - MOST_GUMBEL


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (5000, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.9999, 0.0),
        (0, 1e-6, 0.0),
        (0, 1.0, 0.05),
        (0, 1.0, 1.0),
        (50, 0.8, 0.02),
    ],
)
def test_what_survives_is_what_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    # One row with few likely tokens and one flat row, on which top_p keeps more than the candidates.
    logits = torch.randn(2, 3001, generator=torch.Generator().manual_seed(3)) * torch.tensor([[4.0], [0.2]])

    kept_RV = kept(logits / temperature, [top_k] * 2, [top_p] * 2, [min_p] * 2)

    assert torch.equal(kept_RV, reference(logits, temperature, top_k, top_p, min_p))


def test_rows_with_different_filters_do_not_mix() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(4)) * 3
    top_k, top_p, min_p = [0, 7, 0, 20], [0.5, 1.0, 1.0, 0.7], [0.0, 0.0, 0.1, 0.3]

    kept_RV = kept(logits, top_k, top_p, min_p)

    for row in range(4):
        expected = reference(logits[row : row + 1], 1.0, top_k[row], top_p[row], min_p[row])
        assert torch.equal(kept_RV[row : row + 1], expected)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    number=st.integers(0, 2**31),
    spread=st.floats(0.1, 8),
    temperature=st.floats(0.0625, 4, width=32),
    top_k=st.one_of(st.just(0), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.floats(2**-7, 1, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)
def test_any_combination_keeps_what_transformers_keeps(
    *, number: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(1, 307, generator=generator) * spread
    noise = (torch.rand(6, 307, generator=generator) - 0.5) * TIE
    expected = reference(torch.cat([logits, logits + noise]), temperature, top_k, top_p, min_p)
    # A set that a disturbance of TIE changes depends on rounding.
    assume(bool((expected == expected[0]).all()))

    assert torch.equal(kept(logits / temperature, [top_k], [top_p], [min_p])[0], expected[0])


PLAIN, TIED = [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.3, 0.0]


@pytest.mark.parametrize(
    ("probabilities", "filters", "expected"),
    [
        (PLAIN, {"top_p": 0.6}, [0, 1]),
        (PLAIN, {"min_p": 0.4}, [0, 1, 2]),
        (PLAIN, {"top_k": 1, "top_p": 0.8}, [0]),
        # One after the other, as in transformers: of two tokens the first has 0.57 of what is left.
        (PLAIN, {"top_k": 2, "top_p": 0.5}, [0]),
        (TIED, {"top_k": 2}, [0, 1]),
        (TIED, {"top_p": 0.6}, [0, 1]),
        (TIED, {"top_k": 2, "top_p": 0.99}, [0, 1]),
        (TIED, {"min_p": 0.7}, [0, 1, 2]),
    ],
    ids=str,
)
def test_kept_sets_and_frequencies(
    probabilities: list[float], filters: dict[str, float], expected: list[int]
) -> None:
    count = 100_000
    # A logit of -1e30 stands for a probability of 0.
    logits = torch.full((16,), -1e30)
    logits[:4] = torch.tensor(probabilities).log().clamp(min=-1e30)
    params = arrays(count, temperature=1.0, seed=77, position=np.arange(count), **filters)

    token_ids = sample(logits.expand(count, -1).contiguous(), params).token_ids

    observed = np.bincount(token_ids, minlength=16)
    assert np.flatnonzero(observed).tolist() == expected
    share = np.array(probabilities)[expected]
    awaited = count * share / share.sum()
    # 0.9999 quantile with as many degrees of freedom as there are tokens, at most three.
    assert ((observed[expected] - awaited) ** 2 / awaited).sum() < 21.1


def test_of_tied_tokens_the_lowest_ids_survive() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], *[[3.0, 3.0, 3.0, 3.0, 3.0, 3.0]] * 2])

    # The last row: three of six reach a share of 0.45.
    kept_RV = kept(logits, [3, 4, 0], [1.0, 1.0, 0.45], [0.0, 0.0, 0.0])

    assert [row.nonzero()[:, 0].tolist() for row in kept_RV] == [[0, 1, 3], [0, 1, 2, 3], [0, 1, 2]]


def test_excluded_tokens_never_survive() -> None:
    logits = torch.tensor([[2.0, -torch.inf, 1.0, -torch.inf]]).expand(4, -1)

    kept_RV = kept(logits, [0, 3, 0, 4], [1.0, 1.0, 0.9999999, 0.9999999], [0.0, 0.0, 0.0, 0.0])

    assert [row.nonzero()[:, 0].tolist() for row in kept_RV] == [[0, 2]] * 4
