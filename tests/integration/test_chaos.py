"""Real processes under load while they are killed, stopped, restarted and cut off: nothing is lost.

The course is that of `python -m benchmarks.chaos`, with plain processes and at a quicker pace.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.plan import tiny_plan
from benchmarks.chaos.run import run_chaos
from benchmarks.chaos.summary import format_rows

# Of faults; a cluster's start and what is under way in the end come on top.
SECONDS = 25.0
# Between the lesser faults, and between those that end a process.
EVERY_S = (1.0, 4.0)
ROLES = {"router", "prefill", "decode"}
LINKS = {"client->router", "router->prefill", "router->decode", "prefill->decode"}
RUNS = (
    ("disaggregated", 3),
    *(pytest.param("disaggregated", seed, marks=pytest.mark.long) for seed in (1, 2, 4, 5)),
    pytest.param("auto", 3, marks=pytest.mark.long),
)


@pytest.mark.parametrize(("placement", "seed"), RUNS)
async def test_every_answer_is_complete_whatever_dies(tmp_path: Path, placement: str, seed: int) -> None:
    plan = tiny_plan(
        tmp_path,
        seed=seed,
        seconds=SECONDS,
        ray=False,
        every_s=EVERY_S,
        settings={"placement": placement, "drain_s": 1.0},
    )
    outcome = await run_chaos(plan, tmp_path)
    print(format_rows(outcome.rows))
    # No question failed, no token was wrong, everybody is back, and none holds anything.
    assert outcome.complaints == []
    # Which faults of a deck come first hangs on who is busy; all of them have to in five minutes.
    struck = {strike.kind for strike in outcome.strikes}
    assert len({kind.split()[-1] for kind in struck if "->" in kind} & LINKS) >= 3
    assert len({kind.split()[1] for kind in struck if kind.startswith("stop ")} & ROLES) >= 2
    kills = {kind for kind in struck if kind.startswith("kill ")}
    assert kills
    # Faults that break what is under way must have done so, or they prove nothing.
    assert sum(row.resumed for row in outcome.rows if row.kind in kills) > 0
    assert any(record.was_retried for record in outcome.records)
    assert any(record.was_moved for record in outcome.records)
