"""The one formula: what fits, to the token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.limits import Limits, blocks_needed

LIMITS = Limits(max_model_len=100, vocab_size=50)


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_blocks_round_up(num_tokens: int, blocks: int) -> None:
    assert blocks_needed(num_tokens, 16) == blocks


@given(st.integers(0, 10_000), st.integers(1, 128))
def test_blocks_hold_the_tokens_and_not_one_block_less_does(num_tokens: int, block_size: int) -> None:
    blocks = blocks_needed(num_tokens, block_size)
    assert blocks * block_size >= num_tokens
    assert num_tokens == 0 or (blocks - 1) * block_size < num_tokens


def test_the_last_token_needs_no_kv() -> None:
    assert LIMITS.kv_tokens(10, 1) == 10
    assert LIMITS.kv_tokens(10, 5) == 14


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(1, 99), (99, 1), (60, 40), (1, 1)])
def test_what_fits_exactly_passes(num_prompt_tokens: int, max_tokens: int) -> None:
    LIMITS.check([0] * num_prompt_tokens, max_tokens)
    assert LIMITS.max_output_tokens(num_prompt_tokens) >= max_tokens


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        ([], 1, "prompt"),
        ([0] * 100, 1, "prompt"),
        ([0] * 1_000_000, 1, "prompt"),
        ([50], 1, "token_ids"),
        ([-1], 1, "token_ids"),
        ([0], 0, "max_tokens"),
        ([0], -5, "max_tokens"),
        ([0], 100, "max_tokens"),
        ([0] * 99, 2, "max_tokens"),
    ],
    ids=["empty", "full", "huge", "id above", "id below", "zero", "negative", "one too many", "no room"],
)
def test_what_does_not_fit_is_refused_by_field(prompt: list[int], max_tokens: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        LIMITS.check(prompt, max_tokens)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("num_tokens", "step"), [(1, 0), (31, 0), (32, 0), (33, 1), (64, 1), (65, 2), (99, 2), (100, 2)]
)
def test_a_scale_step_serves_up_to_its_length(num_tokens: int, step: int) -> None:
    limits = Limits(max_model_len=100, vocab_size=50, rope_steps=(32, 64, 100))
    assert (limits.rope_step(num_tokens), limits.rope_border(num_tokens)) == (step, (32, 64, 100)[step])
    assert (LIMITS.rope_step(num_tokens), LIMITS.rope_border(num_tokens)) == (0, 100)


def test_the_largest_legal_id_passes() -> None:
    LIMITS.check([49, 0], 1)
