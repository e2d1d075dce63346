"""Learned bucket edges: shares of work, computed from the raw trace."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from baton.errors import ConfigError
from router.learning.learned_edges import DEFAULT_EDGES, MAX_DEVIATION, MIN_PROMPTS, LearnedEdges

Trace = list[tuple[int, float]]


def mixed_trace(seed: int, num_prompts: int, longest: int = 8192) -> Trace:
    """The 80/15/5 mix: below 128, 128 to 512, and up to the longest; work in ms grows faster than length."""
    rng, trace = random.Random(seed), Trace()
    for _ in range(num_prompts):
        draw = rng.random()
        if draw < 0.8:
            num_tokens = rng.randint(8, 127)
        elif draw < 0.95:
            num_tokens = rng.randint(128, 512)
        else:
            num_tokens = int(512 * (longest / 512) ** rng.random())
        trace.append((num_tokens, 10 + 0.5 * num_tokens + 0.00015 * num_tokens**2))
    return trace


def shares(trace: Trace, edges: tuple[int, ...]) -> list[float]:
    total = sum(work_ms for _, work_ms in trace)
    bounds = (0, *edges, math.inf)
    return [sum(w for n, w in trace if low <= n < high) / total for low, high in pairwise(bounds)]


def learn(learned: LearnedEdges, trace: Trace) -> None:
    for num_tokens, work_ms in trace:
        learned.observe(num_tokens, work_ms)


@pytest.mark.parametrize("num_buckets", [2, 4, 6])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_bucket_carries_its_share_of_the_work(num_buckets: int, seed: int) -> None:
    trace = mixed_trace(seed, 6000)
    learned = LearnedEdges(num_buckets)
    learn(learned, trace)
    # What may pile up before edges move, and a tenth: what is forgotten of the trace, and bins.
    tolerance = (MAX_DEVIATION + 0.1) / num_buckets
    assert shares(trace, learned.edges()) == pytest.approx([1 / num_buckets] * num_buckets, abs=tolerance)


def test_edges_just_learned_are_close_to_equal_shares() -> None:
    trace = mixed_trace(3, MIN_PROMPTS)
    learned = LearnedEdges(4)
    learn(learned, trace)
    assert shares(trace, learned.edges()) == pytest.approx([0.25] * 4, abs=0.25 * 0.25)
    # The default edges are far from it: one bucket has more than half of the work.
    assert max(shares(trace, DEFAULT_EDGES)) > 0.5


def test_until_enough_was_seen_the_edges_are_those_given() -> None:
    learned = LearnedEdges(4, (100, 200))
    assert learned.edges() == (100, 200)
    learn(learned, mixed_trace(4, MIN_PROMPTS - 1))
    assert learned.edges() == (100, 200)
    learned.observe(50, 30.0)
    assert len(learned.edges()) == 3


@pytest.mark.parametrize("seed", [5, 6])
def test_edges_stay_while_traffic_stays(seed: int) -> None:
    trace = mixed_trace(seed, 12_000)
    learned, seen = LearnedEdges(4), set()
    learn(learned, trace[:4000])
    for num_tokens, work_ms in trace[4000:]:
        learned.observe(num_tokens, work_ms)
        seen.add(learned.edges())
    assert len(seen) <= 2  # of 125 reviews


def test_edges_follow_traffic_that_changes() -> None:
    learned = LearnedEdges(4)
    learn(learned, mixed_trace(7, 3000))
    before = learned.edges()
    later = mixed_trace(8, 20_000, longest=1024)
    learn(learned, later)
    assert max(learned.edges()) <= 1024 < max(before)
    tolerance = (MAX_DEVIATION + 0.1) / 4
    assert shares(later, learned.edges()) == pytest.approx([0.25] * 4, abs=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 5, 100, 3000, 10_000_000])
def test_prompts_of_one_length_leave_edges_that_ascend_and_stay(num_tokens: int) -> None:
    learned = LearnedEdges(5)
    for _ in range(MIN_PROMPTS):
        learned.observe(num_tokens, 10.0)
    edges = learned.edges()
    assert len(edges) == 4
    assert all(low < high for low, high in pairwise((0, *edges)))
    for _ in range(3000):
        learned.observe(num_tokens, 10.0)
    assert learned.edges() == edges


@pytest.mark.parametrize("lengths", [(100, 4000), (7, 8, 9), (64, 65, 1000)])
def test_few_lengths_do_not_make_edges_flicker(lengths: tuple[int, ...]) -> None:
    rng, learned, seen = random.Random(9), LearnedEdges(4), set()
    for i in range(8000):
        learned.observe(rng.choice(lengths), 10.0)
        if i > 2000:
            seen.add(learned.edges())
    assert len(seen) == 1
    assert all(low < high for low, high in pairwise(seen.pop()))


def test_edges_stay_where_no_others_would_be_better() -> None:
    rng, learned, seen = random.Random(10), LearnedEdges(2, (9,), min_edge=1), set()
    for _ in range(8000):
        # Four in five prompts have one length: below or above the edge, they outweigh the rest.
        learned.observe(rng.choice((7, 8, 8, 8, 8, 8, 8, 8, 8, 9)), 10.0)
        seen.add(learned.edges())
    assert seen == {(9,)}


def test_no_edge_is_lower_than_the_lowest_allowed() -> None:
    learned = LearnedEdges(4, min_edge=32)
    for i in range(2 * MIN_PROMPTS):
        learned.observe(1 + i % 30, 10.0)
    assert min(learned.edges()) >= 32


@pytest.mark.parametrize("work_ms", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_work_that_cannot_be_is_not_learned(work_ms: float) -> None:
    learned = LearnedEdges(4)
    for _ in range(2 * MIN_PROMPTS):
        learned.observe(5000, work_ms)
        learned.observe(0, 10.0)
    assert learned.edges() == DEFAULT_EDGES


def test_one_bucket_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        LearnedEdges(1)
    assert caught.value.field == "num_buckets"
