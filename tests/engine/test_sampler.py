"""The sampler against transformers' processors and against the distribution it should draw from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.batch import SamplingArrays
from engine.sampler import sample, survivors


def arrays(count: int, **columns: Any) -> SamplingArrays:
    """Parameters of `count` rows; each column is one value for all rows, or one per row."""
    kinds = {
        "temperature": (0.0, np.float32),
        "top_k": (0, np.int64),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seed": (0, np.uint64),
        "position": (10, np.int64),
        "sample_index": (0, np.int64),
        "want_logprobs": (False, np.bool_),
    }
    filled = {
        name: np.broadcast_to(np.asarray(columns.get(name, default), dtype), (count,)).copy()
        for name, (default, dtype) in kinds.items()
    }
    return SamplingArrays(**filled)


def reference_survivors(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors(None, logits[None].clone())[0].isfinite()


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
    scaled = logits / temperature

    thresholds = survivors(
        scaled, torch.tensor([top_k] * 2), torch.tensor([top_p] * 2), torch.tensor([min_p] * 2)
    )

    for row in range(2):
        expected = reference_survivors(logits[row], temperature, top_k, top_p, min_p)
        assert torch.equal(scaled[row] >= thresholds[row], expected)


def test_rows_with_different_filters_do_not_mix() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(4)) * 3
    top_k, top_p, min_p = [0, 7, 0, 20], [0.5, 1.0, 1.0, 0.7], [0.0, 0.0, 0.1, 0.3]

    thresholds = survivors(logits, torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))

    for row in range(4):
        expected = reference_survivors(logits[row], 1.0, top_k[row], top_p[row], min_p[row])
        assert torch.equal(logits[row] >= thresholds[row], expected)


def test_greedy_rows_take_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [40, 41, 299]] = 5.0
    logits[1, [0, 299]] = 1.0

    assert sample(logits, arrays(2)).token_ids.tolist() == [40, 0]


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.3, -2.0])
    count, temperature = 20000, 0.8
    params = arrays(count, temperature=temperature, seed=123, position=np.arange(count))

    token_ids = sample(logits.expand(count, -1).contiguous(), params).token_ids

    expected = count * torch.softmax(logits.double() / temperature, dim=-1).numpy()
    observed = np.bincount(token_ids, minlength=7)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 22.5  # 0.999 quantile with 6 degrees of freedom


def test_draws_after_filters_follow_the_renormalised_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.3, -2.0])
    count = 20000
    params = arrays(count, temperature=1.0, top_k=3, seed=np.arange(count) * 2**40 + 1)

    token_ids = sample(logits.expand(count, -1).contiguous(), params).token_ids

    kept = np.array([0, 1, 4])
    observed = np.bincount(token_ids, minlength=7)
    assert observed.sum() == observed[kept].sum()
    expected = count * torch.softmax(logits[kept].double(), dim=-1).numpy()
    assert ((observed[kept] - expected) ** 2 / expected).sum() < 13.9  # 0.999 quantile, 2 degrees


@pytest.mark.parametrize("name", ["seed", "position", "sample_index"])
def test_each_part_of_the_key_changes_the_draws(name: str) -> None:
    logits = torch.zeros(64, 997)
    base = {"temperature": 1.0, "seed": 7, "position": np.arange(64), "sample_index": 0}
    changed = base | {name: np.asarray(base[name]) + 1000}

    first, second = (sample(logits, arrays(64, **columns)).token_ids for columns in (base, changed))

    assert (first != second).mean() > 0.9


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(8))
    columns = {
        "temperature": np.array([0.0, 0.7, 1.0, 0.0, 1.3, 0.9]),
        "top_k": np.array([0, 10, 0, 0, 0, 3]),
        "top_p": np.array([1.0, 1.0, 0.9, 1.0, 1.0, 0.5]),
        "seed": np.arange(6, dtype=np.uint64) + np.uint64(2**63),
    }
    together = sample(logits, arrays(6, **columns)).token_ids

    alone = [
        sample(logits[row : row + 1], arrays(1, **{k: v[row] for k, v in columns.items()})).token_ids[0]
        for row in range(6)
    ]

    assert together.tolist() == alone


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_marked_and_harms_no_other(bad: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(9))
    params = arrays(3, temperature=np.array([1.0, 1.0, 0.0]), want_logprobs=True, seed=5)
    clean = sample(logits.clone(), params)
    logits[1, 17] = bad

    sampled = sample(logits, params)

    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert np.isfinite(sampled.logprobs).all()


def test_logprobs_are_those_of_the_unfiltered_distribution() -> None:
    logits = torch.randn(3, 80, generator=torch.Generator().manual_seed(2)) * 2
    params = arrays(3, temperature=0.1, top_k=2, want_logprobs=np.array([True, False, True]))

    sampled = sample(logits, params)

    exact = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    for row in (0, 2):
        assert sampled.logprobs[row] == pytest.approx(exact[row, sampled.token_ids[row]].item(), abs=1e-5)
    assert sampled.logprobs[1] == 0


def test_rows_that_keep_few_and_many_tokens_draw_the_same_numbers() -> None:
    # The two rows differ only in tokens that cannot win, which decide how the numbers are computed.
    generator = torch.Generator().manual_seed(11)
    many = torch.full((40, 2000), -12.0)
    many[:, ::250] = torch.randn(40, 8, generator=generator)
    few = many.clone()
    few[many == -12.0] = -30.0
    columns = {"temperature": 1.0, "seed": np.arange(40)}

    drawn_many, drawn_few = (sample(logits, arrays(40, **columns)).token_ids for logits in (many, few))

    # At e^-12 each, the 1992 others win about once in a hundred draws.
    assert (drawn_many == drawn_few).mean() > 0.9
    assert set(drawn_few.tolist()) <= set(range(0, 2000, 250))


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(6)) * 30

    sampled = sample(logits, arrays(4, temperature=1e-38))

    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
