"""The edits that requests bring into a step, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.sampling import SamplingParams
from engine.batch import LogitEdits, RowTokens
from engine.request import Request
from engine.request_edits import gather_edits
from engine.token_mask import TokenMask
from tests.engine.tiny_models import make_request

EOS = frozenset({2, 1})


def request(prompt: list[int], answer: list[int], **fields: Any) -> Request:
    params = SamplingParams(max_tokens=64, **fields)
    return make_request([*prompt, *answer], num_prompt_tokens=len(prompt), params=params)


def pairs(at: RowTokens | None) -> list[tuple[int, int]]:
    assert at is not None
    return list(zip(at.rows.tolist(), at.token_ids.tolist(), strict=True))


def gather(*requests: Request) -> LogitEdits:
    edits = gather_edits(requests, EOS)
    assert edits is not None
    return edits


def test_plain_requests_have_no_edits() -> None:
    plain = request([1, 2], [3], temperature=0.5, top_k=3, stop_token_ids=(7,), logprobs=True)

    assert gather_edits([plain, plain], EOS) is None
    assert gather_edits([], EOS) is None


def test_only_a_repetition_penalty_looks_at_the_prompt() -> None:
    repetition = request([8, 9], [9, 5], repetition_penalty=1.5)
    frequency = request([8, 9], [9, 5, 5], frequency_penalty=0.5, presence_penalty=-1)

    penalties = gather(request([1], []), repetition, frequency).penalties

    assert penalties is not None
    assert pairs(penalties.at) == [(1, 8), (1, 9), (1, 5), (2, 9), (2, 5)]
    assert penalties.counts.tolist() == [0, 1, 1, 1, 2]
    assert penalties.repetition.tolist() == [1, 1.5, 1]
    assert penalties.presence.tolist() == [0, 0, -1]
    assert penalties.frequency.tolist() == [0, 0, 0.5]


def test_counts_follow_the_answer() -> None:
    growing = request([8], [5], frequency_penalty=1)
    gather(growing)

    growing.token_ids += [6, 5]
    penalties = gather(growing).penalties

    assert penalties is not None
    assert dict(zip(penalties.at.token_ids.tolist(), penalties.counts.tolist(), strict=True)) == {5: 2, 6: 1}


def test_biases_and_allowed_ids() -> None:
    biased = request([1], [], logit_bias=((3, 1.5), (7, -2.0)))
    limited = request([1], [], allowed_token_ids=(4, 6))

    edits = gather(biased, limited, biased)

    assert edits.biases is not None
    assert pairs(edits.biases.at) == [(0, 3), (0, 7), (2, 3), (2, 7)]
    assert edits.biases.values.tolist() == [1.5, -2.0, 1.5, -2.0]
    assert pairs(edits.allowed) == [(1, 4), (1, 6)]


def test_min_tokens_holds_ends_back_until_the_answer_has_them() -> None:
    fields: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (9, 2)}
    one_to_go = request([1], [5], **fields)
    enough = request([1], [5, 5], **fields)
    ignoring = request([1], [5], ignore_eos=True, **fields)

    edits = gather(one_to_go, enough, ignoring)

    assert pairs(edits.banned) == [(0, 1), (0, 2), (0, 9), (2, 2), (2, 9)]


def test_a_grammars_mask_travels_with_its_row() -> None:
    mask = TokenMask(lambda: np.zeros(1, np.uint32))
    constrained = request([1], [])
    constrained.mask = mask

    assert gather(request([1], []), constrained).masks == ((1, mask),)
