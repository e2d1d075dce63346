"""The arithmetic of row 20: latencies, rates and windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.outcome import Outcome
from benchmarks.attainment import Objectives, Window
from benchmarks.headline import NAIVE, OURS, Headline, latencies_s, window_s
from benchmarks.workload import MIXES, Workload


def outcome(*token_s: float) -> Outcome:
    return Outcome(num_prompt_tokens=10, max_tokens=1, token_s=token_s)


def test_a_prompt_without_an_answer_counts_with_its_deadline() -> None:
    assert latencies_s([outcome(0.25), outcome()]) == [0.25, 120.0]


def test_windows_fill_the_minutes() -> None:
    # 660 s, of which 60 for the start; 4 rounds of four windows and one to end.
    assert window_s(11, 4) == pytest.approx(30.0)
    with pytest.raises(ValueError, match="more minutes"):
        window_s(2, 4)


def test_rows_compare_medians_over_rounds_at_both_rates(tmp_path: Path) -> None:
    run = Headline(
        workload=Workload(mix=MIXES["80/15/5"], vocab_size=300, max_tokens=1),
        model="tiny",
        folder=tmp_path,
        threads=1,
        batch_size=4,
        rounds=3,
        window_s=10.0,
        seed=0,
        capacities={OURS: 4.0, NAIVE: 2.0},
    )
    for number, (ours, naive) in enumerate([(0.1, 0.4), (0.3, 0.9), (0.2, 9.0)]):
        for side, latency, rate in (
            (OURS, ours, 2.8),
            (NAIVE, naive, 2.8),
            (OURS, 0.1, 1.4),
            (NAIVE, 0.15, 1.4),
        ):
            run.windows.append(
                Window(
                    side=side,
                    rate=rate,
                    round_number=number,
                    outcomes=(outcome(latency),),
                    objectives=Objectives(),
                )
            )

    found = {row.metric: row for row in run.rows()}

    assert run.rates == pytest.approx((2.8, 1.4))
    assert found[f"80/15/5: prompts at once, {OURS}"].ratio == 2.0
    loaded = found["80/15/5 at 70 % of our capacity: prefill p99"]
    assert (loaded.ours, loaded.peer, loaded.runs) == pytest.approx((200.0, 900.0, 3))
    assert loaded.ratio == pytest.approx(4.5)
    assert loaded.target == 2.67
    assert found["80/15/5 at 70 % of its peer's capacity: prefill p99"].ratio == pytest.approx(1.5)
