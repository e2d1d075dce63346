from __future__ import annotations

import pytest

from baton.bench.outcome import Outcome
from baton.bench.slo import Slo


def outcome(*token_s: float, failure: str = "") -> Outcome:
    return Outcome(num_prompt_tokens=9, max_tokens=3, token_s=token_s, failure=failure)


# TTFT 0.4 s, gaps of 0.02 and 0.08 s (mean 0.05), 0.5 s in all.
GOOD = outcome(0.40, 0.42, 0.50)


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=500ms", Slo(ttft_ms=500.0)),
        ("ttft=0.5s, itl=50", Slo(ttft_ms=500.0, itl_ms=50.0)),
        ("e2e=5s", Slo(e2e_ms=5000.0)),
    ],
)
def test_objectives_are_read(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=-1", "tpot=5ms", "itl=5m", "itl=1,itl=2"])
def test_what_is_no_objective_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no objective"):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        (Slo(), True),
        (Slo(ttft_ms=401.0, itl_ms=51.0, e2e_ms=501.0), True),
        (Slo(ttft_ms=399.0), False),
        # The mean of the gaps counts, not the largest.
        (Slo(itl_ms=51.0), True),
        (Slo(itl_ms=49.0), False),
        (Slo(e2e_ms=499.0), False),
        # Equal limits are limits of different things.
        (Slo(itl_ms=401.0, ttft_ms=401.0, e2e_ms=401.0), False),
    ],
)
def test_every_limit_counts(slo: Slo, is_met: bool) -> None:
    assert slo.is_met(GOOD) is is_met


@pytest.mark.parametrize("bad", [outcome(0.1, 0.2), outcome(0.1, 0.2, 0.3, failure="UNAVAILABLE"), outcome()])
def test_an_incomplete_answer_meets_nothing(bad: Outcome) -> None:
    assert not Slo().is_met(bad)
