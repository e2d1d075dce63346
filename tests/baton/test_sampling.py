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
        logprobs=st.booleans(),
    )
)
def test_the_wire_keeps_everything(params: SamplingParams) -> None:
    data = params.to_proto().SerializeToString()
    assert SamplingParams.from_proto(common_pb2.SamplingParams.FromString(data)) == params
