"""Sampling parameters: legal values, refused values, and the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.sampling import MAX_SEED, SamplingParams
from baton.v1 import common_pb2

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.5, NAN, INF, -INF)),
        *(("top_k", value) for value in (-1, 2**31)),
        *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN, INF)),
        *(("min_p", value) for value in (-0.01, 1.01, NAN)),
        *(("seed", value) for value in (-1, 2**64)),
        *(("max_tokens", value) for value in (0, -1)),
        ("stop_token_ids", tuple(range(65))),
        *(("repetition_penalty", value) for value in (0.0, -1.0, 101.0, NAN, INF)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("min_tokens", value) for value in (-1, 129)),
        *(("logit_bias", ((3, value),)) for value in (-100.5, 101.0, NAN)),
        ("logit_bias", ((3, 1.0), (3, 1.0))),
        ("logit_bias", ((4, 1.0), (3, 1.0))),
        ("logit_bias", tuple((token_id, 0.0) for token_id in range(1025))),
        *(("top_logprobs", value) for value in (-1, 1, 21)),
        *(("prompt_logprobs", value) for value in (-1, 21)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field
    assert field in error.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 2**31 - 1},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"seed": MAX_SEED},
        {"stop_token_ids": tuple(range(64))},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"min_tokens": 8, "max_tokens": 8},
        {"logit_bias": ((0, -100.0), (9, 100.0))},
        {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20},
        {"prompt_logprobs": 0},
        {"allowed_token_ids": (5,)},
    ],
)
def test_values_at_their_limits_are_legal(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


def test_parameters_never_change() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3  # type: ignore[misc]


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 100, width=32),
        top_k=st.integers(0, 2**31 - 1),
        top_p=st.floats(0, 1, width=32, exclude_min=True),
        min_p=st.floats(0, 1, width=32),
        seed=st.integers(0, MAX_SEED),
        max_tokens=st.integers(1, 2**31 - 1),
        stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=64).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.just(True),
        top_logprobs=st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        repetition_penalty=st.floats(0.5, 100, width=32),
        presence_penalty=st.floats(-2, 2, width=32),
        frequency_penalty=st.floats(-2, 2, width=32),
        logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32), max_size=9).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        allowed_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
        min_tokens=st.integers(0, 1),
    )
)
def test_the_wire_keeps_everything(params: SamplingParams) -> None:
    data = params.to_proto().SerializeToString()
    assert SamplingParams.from_proto(common_pb2.SamplingParams.FromString(data)) == params


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": ((2, 0.5), (97, 1.0))}, "logit_bias"),
        ({"allowed_token_ids": (96, 97)}, "allowed_token_ids"),
        ({"stop_token_ids": (400,)}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    params = SamplingParams(**fields)
    params.check_vocab(401)
    with pytest.raises(InvalidRequest) as error:
        params.check_vocab(97)
    assert error.value.field == field


@pytest.mark.parametrize("field", ["top_logprobs", "prompt_logprobs"])
def test_no_more_likeliest_tokens_than_there_are(field: str) -> None:
    params = SamplingParams(logprobs=True, **{field: 10})
    params.check_vocab(10)
    with pytest.raises(InvalidRequest) as error:
        params.check_vocab(9)
    assert error.value.field == field
