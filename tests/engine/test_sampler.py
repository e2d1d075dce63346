"""The sampler against an independent oracle and against the distribution it should draw from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.sampling import SamplingParams
from engine.batch import LogitEdits, RowTokens
from engine.batch_builder import Chunk, build_batch
from engine.sampler import Sampled, sample
from engine.token_mask import TokenMask
from tests.engine.sampling_arrays import arrays
from tests.engine.tiny_models import make_request
from tests.sampling_oracle import choose, likeliest


def test_greedy_rows_take_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [40, 41, 299]] = 5.0
    logits[1, [0, 299]] = 1.0

    assert sample(logits, arrays(2)).token_ids.tolist() == [40, 0]


def seven_likely() -> torch.Tensor:
    """Seven of 32 tokens have a chance; few survivors are the quick case."""
    logits = torch.full((32,), -1e30)
    logits[:7] = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.3, -2.0])
    return logits


def test_draws_follow_the_softmax() -> None:
    logits = seven_likely()
    count, temperature = 20000, 0.8
    params = arrays(count, temperature=temperature, seed=123, position=np.arange(count))

    token_ids = sample(logits.expand(count, -1).contiguous(), params).token_ids

    expected = count * torch.softmax(logits[:7].double() / temperature, dim=-1).numpy()
    observed = np.bincount(token_ids, minlength=7)
    assert len(observed) == 7
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 22.5  # 0.999 quantile with 6 degrees of freedom


def test_draws_after_filters_follow_the_renormalised_softmax() -> None:
    logits = seven_likely()
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


V = 211
IDS = st.integers(0, V - 1)


def sample_next(logits: torch.Tensor, prompt: Sequence[int], answer: Sequence[int], **fields: Any) -> Sampled:
    """Samples what follows the tokens, by the arrays that a scheduler's batch would have."""
    sample_index = fields.pop("sample_index", 0)
    tokens = [*prompt, *answer]
    request = make_request(
        tokens, num_prompt_tokens=len(prompt), params=SamplingParams(**fields), sample_index=sample_index,
        block_ids=list(range(40)), num_computed_tokens=len(tokens) - 1,
    )  # fmt: skip
    batch = build_batch(1, [Chunk.of(request, 1)], 4, eos_token_ids=(3, 5))
    return sample(logits[None].clone(), batch.sampling)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.just(0.0), st.floats(2**-7, 3, width=32)),
        "top_k": st.one_of(st.just(0), st.integers(1, V)),
        "top_p": st.one_of(st.just(1.0), st.floats(2**-5, 1, width=32)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
        "repetition_penalty": st.one_of(st.just(1.0), st.floats(0.25, 4, width=32)),
        "presence_penalty": st.one_of(st.just(0.0), st.floats(-2, 2, width=32)),
        "frequency_penalty": st.one_of(st.just(0.0), st.floats(-2, 2, width=32)),
        "logit_bias": st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=5).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        "allowed_token_ids": st.one_of(st.just(()), st.lists(IDS, min_size=10, max_size=40, unique=True)).map(
            tuple
        ),
        "stop_token_ids": st.lists(IDS, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 20),
        "seed": st.integers(0, 2**64 - 1),
        "sample_index": st.integers(0, 7),
    }
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    PARAMS,
    st.integers(0, 2**31),
    st.lists(IDS, min_size=1, max_size=30),
    st.lists(IDS, max_size=30),
)
def test_any_parameters_choose_what_the_oracle_chooses(
    fields: dict[str, Any], number: int, prompt: list[int], answer: list[int]
) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(number)) * 3
    sample_index = fields["sample_index"]
    params = SamplingParams(
        **{k: v for k, v in fields.items() if k != "sample_index"}, logprobs=True, top_logprobs=4
    )
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (3, 5))}
    expected, is_tie = choose(logits, prompt, answer, params, stops=stops, sample_index=sample_index)
    assume(not is_tie)

    sampled = sample_next(logits, prompt, answer, **fields, logprobs=True, top_logprobs=4)

    assert sampled.token_ids.tolist() == [expected]
    assert sampled.blocked == frozenset()
    exact = torch.log_softmax(logits.double(), -1)
    assert sampled.logprobs[0] == pytest.approx(exact[expected].item(), abs=1e-5)
    assert sampled.top is not None
    top = likeliest(logits, 4)
    assert sampled.top.token_ids[0].tolist() == [token_id for token_id, _ in top]
    assert sampled.top.logprobs[0].tolist() == pytest.approx([logprob for _, logprob in top], abs=1e-5)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside a random row"])
@pytest.mark.parametrize(
    "columns",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.0, "top_p": 0.9},
        {"temperature": 1e-6},
    ],
    ids=str,
)
def test_ties_go_to_the_lowest_id(columns: dict[str, float], alone: bool) -> None:
    logits = torch.tensor([2.0, 2.0, 1.0], dtype=torch.bfloat16).float()
    count = 200
    if alone:
        params = arrays(count, seed=np.arange(count), **columns)
        sampled = sample(logits.expand(count, -1).contiguous(), params)
        assert sampled.token_ids.tolist() == [0] * count
        return
    mixed = {name: [value, default] for name, value, default in _with_defaults(columns)}
    for seed in range(count):
        rows = torch.stack([logits, torch.randn(3, generator=torch.Generator().manual_seed(seed))])
        assert sample(rows, arrays(2, seed=seed, **mixed)).token_ids[0] == 0


def _with_defaults(columns: dict[str, float]) -> list[tuple[str, float, float]]:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return [(name, columns.get(name, default), default) for name, default in defaults.items()]


def test_a_row_without_a_token_left_is_marked_and_harms_no_other() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    everything = np.arange(40)
    edits = LogitEdits(banned=RowTokens(rows=np.full(40, 1), token_ids=everything))
    columns = {"temperature": 1.0, "want_logprobs": True, "seed": np.arange(3)}
    plain = sample(logits.clone(), arrays(3, **columns))

    sampled = sample(logits.clone(), arrays(3, **columns, edits=edits))

    assert sampled.blocked == {1}
    assert sampled.finite.all()
    assert sampled.token_ids[[0, 2]].tolist() == plain.token_ids[[0, 2]].tolist()
    assert np.isfinite(sampled.logprobs).all()


def test_a_grammars_mask_decides_last() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]] * 2)
    masks = ((1, TokenMask(lambda: np.array([0b01100], np.uint32))),)
    edits = LogitEdits(allowed=RowTokens(rows=np.array([1, 1]), token_ids=np.array([0, 3])), masks=masks)

    sampled = sample(logits, arrays(2, edits=edits, want_logprobs=True))

    assert sampled.token_ids.tolist() == [0, 3]
    exact = torch.log_softmax(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]).double(), -1)
    assert sampled.logprobs.tolist() == pytest.approx([exact[0].item(), exact[3].item()], abs=1e-6)


def test_a_mask_that_cannot_be_computed_ends_its_row_only() -> None:
    error = InvalidRequest("the grammar is too complex", field="grammar")

    def fail() -> Any:
        raise error

    edits = LogitEdits(masks=((0, TokenMask(fail)), (1, TokenMask(lambda: np.array([0b10], np.uint32)))))

    sampled = sample(torch.tensor([[2.0, 1.0]] * 3), arrays(3, edits=edits))

    assert sampled.mask_errors == {0: error}
    assert sampled.token_ids[1:].tolist() == [1, 0]


def test_logprobs_of_what_edits_and_filters_exclude_are_finite() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -3e38]])
    edits = LogitEdits(banned=RowTokens(rows=np.zeros(2, np.int64), token_ids=np.array([0, 1])))
    params = arrays(
        1, temperature=0.01, top_p=0.3, want_logprobs=True, num_top_logprobs=5, edits=edits, seed=4
    )

    sampled = sample(logits, params)

    assert sampled.token_ids.tolist() == [2]
    assert sampled.top is not None
    assert sampled.top.token_ids.tolist() == [[0, 1, 2, 3, 4]]
    # The last is beyond e^-87, where fp32 has nothing between it and 0.
    expected = torch.log_softmax(torch.tensor([3.0, 2.0, 1.0, 0.0]).double(), -1).tolist()
    assert sampled.top.logprobs[0, :4].tolist() == pytest.approx(expected, abs=1e-6)
    assert sampled.top.logprobs[0, 4] == pytest.approx(-3e38)
