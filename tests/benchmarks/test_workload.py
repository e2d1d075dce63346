"""The requests of a window: the mix they promise, and the same ones for every side."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from baton.bench.trace_file import TraceEntry
from benchmarks.workload import MIXES, Workload

MIXED = Workload(mix=MIXES["70/30"], vocab_size=5000)


@pytest.mark.parametrize(
    ("mix", "edges", "counts"),
    [("80/15/5", (127, 512, 2000), (160, 30, 10)), ("70/30", (100, 999, 2000), (140, 0, 60))],
)
def test_the_shares_are_exact(mix: str, edges: tuple[int, ...], counts: tuple[int, ...]) -> None:
    workload = Workload(mix=MIXES[mix], vocab_size=5000)

    lengths = [len(request.token_ids) for request in workload.burst(200, 0)]

    lows = (0, *(edge + 1 for edge in edges))
    found = tuple(sum(low <= n <= high for n in lengths) for low, high in zip(lows, edges, strict=False))
    assert found == counts
    assert min(lengths) >= 16


def test_a_seed_is_one_window_and_another_is_another() -> None:
    assert MIXED.window(2.0, 20.0, 5) == MIXED.window(2.0, 20.0, 5)
    assert MIXED.window(2.0, 20.0, 5) != MIXED.window(2.0, 20.0, 6)


def test_a_rate_changes_when_prompts_come_and_not_how_long_they_are_and_repeats_none() -> None:
    slow, fast = MIXED.window(1.0, 20.0, 5), MIXED.window(2.0, 10.0, 5)

    assert [len(request.token_ids) for request in slow] == [len(request.token_ids) for request in fast]
    # What one window left in a cluster's caches is of no use to the next.
    assert not {request.token_ids[:4] for request in slow} & {request.token_ids[:4] for request in fast}
    assert [request.at_s / 2 for request in slow] == pytest.approx([request.at_s for request in fast])


def test_prompts_share_no_prefix_and_no_control_token() -> None:
    prompts = [request.token_ids for request in MIXED.burst(100, 0)]

    # 16 ids of 4,900: that two prompts agree in the first four is a chance of 1 in 10^11.
    assert len({prompt[:4] for prompt in prompts}) == 100
    assert all(100 <= id_ < 5000 for prompt in prompts for id_ in prompt)


def test_a_small_vocabulary_is_not_left() -> None:
    tiny = replace(MIXED, vocab_size=150)

    assert {id_ for request in tiny.burst(50, 0) for id_ in request.token_ids} == set(range(75, 150))


def test_bursty_arrivals_come_closer_together() -> None:
    def shortest_tenth(workload: Workload) -> float:
        times = [request.at_s for request in workload.window(1.0, 300.0, 1)]
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        return gaps[len(gaps) // 10]

    # A tenth of exponential gaps is below -ln 0.9 = 0.105.
    assert shortest_tenth(MIXED) == pytest.approx(0.105, abs=0.05)
    assert shortest_tenth(replace(MIXED, cv=3.0)) < 0.001


def test_a_trace_says_lengths_which_are_bounded() -> None:
    entries = (
        TraceEntry(at_s=0.0, num_prompt_tokens=40, num_output_tokens=5),
        TraceEntry(at_s=2.0, num_prompt_tokens=9000, num_output_tokens=400),
    )
    workload = replace(MIXED, trace=entries, max_prompt_tokens=1000)

    planned = workload.window(1.0, 4.5, 0)

    assert [(len(request.token_ids), request.max_tokens) for request in planned] == [
        (40, 5), (1000, 32), (40, 5), (1000, 32),
    ]  # fmt: skip
    assert [request.at_s for request in planned] == [1.0, 2.0, 3.0, 4.0]
    assert (workload.name, workload.longest) == ("trace", 1000)
