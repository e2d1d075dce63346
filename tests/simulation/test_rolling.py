"""Every node of a cluster is restarted in turn, as planned, under load: nobody notices."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.plan import rolling
from tests.simulation.run import report, run

NUM_SEEDS = 6


@pytest.mark.timeout(300)
def test_a_rolling_restart_fails_no_request_and_counts_against_nobody() -> None:
    outcomes: Counter[str] = Counter()
    points: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        result = run(rolling(seed))
        assert not result.defects, report(result)
        outcomes += result.outcomes
        points += result.sometimes
    print(outcomes, points)
    # All but the probes, of which every other one may be cancelled and one wants the impossible.
    assert set(outcomes) == {"finished", "cancelled", "OVERLOADED"}
    assert outcomes["cancelled"] <= 2 * NUM_SEEDS
    assert outcomes["OVERLOADED"] == NUM_SEEDS
    assert points["a node left as it was told to"] == 6 * NUM_SEEDS
    assert points["a draining worker handed an answer over"]
    assert points["a router handed an answer over"]
    assert not points["a further attempt was taken from the budget"]
