from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import pytest

from baton.bench.lengths import Lengths
from baton.bench.prompts import TRACE_BLOCK, Prompts
from baton.bench.trace_file import TraceEntry

PROMPTS = Prompts(
    seed=3,
    input_lengths=Lengths.parse("20-40"),
    output_lengths=Lengths.parse("5-9"),
    first_id=100,
    last_id=105,
)


def test_lengths_and_ids_keep_to_their_ranges() -> None:
    requests = list(islice(PROMPTS.drawn(), 300))
    assert {len(request.token_ids) for request in requests} == set(range(20, 41))
    assert {request.max_tokens for request in requests} == set(range(5, 10))
    assert {token_id for request in requests for token_id in request.token_ids} == set(range(100, 106))


def test_the_same_seed_asks_the_same_and_another_one_does_not() -> None:
    first = list(islice(PROMPTS.drawn(), 10))
    assert list(islice(PROMPTS.drawn(), 10)) == first
    assert list(islice(replace(PROMPTS, seed=4).drawn(), 10)) != first
    assert list(islice(PROMPTS.drawn("warm-up"), 10)) != first


def test_an_open_loop_asks_the_same_as_a_closed_one() -> None:
    drawn = list(islice(PROMPTS.drawn(), 50))
    arriving = list(islice(PROMPTS.arriving(2.0), 50))
    assert [(r.token_ids, r.max_tokens) for r in arriving] == [(r.token_ids, r.max_tokens) for r in drawn]
    assert arriving[0].at_s == 0.0
    assert all(a.at_s < b.at_s for a, b in pairwise(arriving))


def test_twice_the_rate_is_half_the_time() -> None:
    slow, fast = (list(islice(PROMPTS.arriving(rate), 20)) for rate in (1.0, 2.0))
    assert [r.at_s for r in fast] == pytest.approx([r.at_s / 2 for r in slow])


def test_a_shared_prefix_is_shared_and_no_more() -> None:
    prompts = replace(PROMPTS, shared_prefix=15, last_id=9999)
    requests = list(islice(prompts.drawn(), 20))
    assert len({request.token_ids[:15] for request in requests}) == 1
    assert len({request.token_ids[15:] for request in requests}) == 20
    assert {len(request.token_ids) for request in requests} <= set(range(20, 41))


def test_a_prefix_longer_than_a_prompt_is_cut() -> None:
    request = next(replace(PROMPTS, shared_prefix=1000).drawn())
    assert 20 <= len(request.token_ids) <= 40


def test_a_trace_keeps_times_lengths_and_what_prompts_share() -> None:
    prompts = replace(PROMPTS, last_id=9999)
    long, short = 2 * TRACE_BLOCK + 10, TRACE_BLOCK + 3
    trace = [
        TraceEntry(at_s=0.0, num_prompt_tokens=long, num_output_tokens=7, hash_ids=(1, 2, 3)),
        TraceEntry(at_s=3.0, num_prompt_tokens=short, num_output_tokens=8, hash_ids=(1, 9)),
        TraceEntry(at_s=9.0, num_prompt_tokens=40, num_output_tokens=1),
    ]

    first, second, third = prompts.replayed(trace, speed=3.0)

    assert [request.at_s for request in (first, second, third)] == [0.0, 1.0, 3.0]
    assert [len(request.token_ids) for request in (first, second, third)] == [long, short, 40]
    assert [request.max_tokens for request in (first, second, third)] == [7, 8, 1]
    assert first.token_ids[:TRACE_BLOCK] == second.token_ids[:TRACE_BLOCK]
    assert first.token_ids[TRACE_BLOCK : TRACE_BLOCK + 3] != second.token_ids[TRACE_BLOCK:]
