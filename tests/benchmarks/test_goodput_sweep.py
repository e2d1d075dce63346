"""How a sweep spends its time, whom it takes to the finals, and whom it compares."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.bench.outcome import Outcome, Planned
from baton.bench.target import Bounds
from benchmarks import goodput_sweep
from benchmarks.attainment import Objectives
from benchmarks.goodput_rows import facts, rows
from benchmarks.goodput_sides import Side, control_sides, product_sides
from benchmarks.goodput_sweep import Sweep, SweepPlan, best_controls, window_s
from benchmarks.workload import MIXES, Workload

OURS = product_sides()[0]
CONTROLS = [side for side in control_sides(2000) if "2 x 1" in side.name]


def test_the_controls_are_two_shapes_of_two_threads_and_five_chunks() -> None:
    sides = control_sides(2000)

    assert len(sides) == 10
    assert {side.cluster["decode"] * side.cluster["threads"] for side in sides} == {2}
    assert {side.tables["decode"]["chunk_tokens"] for side in sides} == {64, 128, 256, 512, 2000}
    assert [side.name for side in sides if side.is_unchunked] == [
        "colocated 2 x 1 thread, whole",
        "colocated 1 x 2 threads, whole",
    ]


def test_roles_read_a_sides_tables(tmp_path: Path) -> None:
    text = CONTROLS[0].config_file(tmp_path).read_text(encoding="utf-8")

    assert text == "[decode]\nchunk_tokens = 64\nmixed_tokens = 64\nmax_batch_tokens = 128\n"


def test_windows_fill_the_minutes() -> None:
    # Ours and one control, no screen: 2 sides x 3 windows x 2 rounds. 600 s less 2 starts of 12 s and 6 s for
    # each window to end leave 504 s.
    found = window_s(10, num_products=1, controls=CONTROLS[:1], finalists=2, rounds=2, num_probes=3)

    assert found == pytest.approx(504 / 12)


def test_too_few_minutes_are_refused_with_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"31 windows need 8\.0 minutes"):
        # 5 to screen, and 2 rounds of 3 searches in 4 windows and one unchunked: 31 of 6 s, and as much for
        # each to end; 9 starts of 12 s.
        window_s(1, num_products=1, controls=CONTROLS, finalists=2, rounds=2, num_probes=4)


class PlayedSide:
    """Prefill takes `stall_s`, and above a rate of `capacity` nothing is answered in time."""

    def __init__(self, capacity: float, stall_s: float) -> None:
        self.capacity, self.stall_s = capacity, stall_s


PLAYED = {
    OURS.name: PlayedSide(4.0, 0.1),
    "colocated 2 x 1 thread, chunk 64": PlayedSide(1.0, 0.2),
    "colocated 2 x 1 thread, chunk 128": PlayedSide(3.0, 0.3),
    "colocated 2 x 1 thread, chunk 256": PlayedSide(2.5, 0.4),
    "colocated 2 x 1 thread, chunk 512": PlayedSide(2.0, 0.5),
    "colocated 2 x 1 thread, whole": PlayedSide(1.5, 1.2),
}


# Prompts by side, a list per window.
sent: dict[str, list[list[tuple[int, ...]]]] = {}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Clusters that answer at once, by arithmetic; returns what was measured."""
    measured: list[tuple[str, float]] = []

    @asynccontextmanager
    async def running(side: Side, *_: object) -> AsyncIterator[str]:
        yield side.name

    async def offer(name: str, requests: list[Planned], _bounds: Bounds) -> list[Outcome]:
        # The rate, from the number of requests in 100 s.
        rate = len(requests) / 100
        measured.append((name, rate))
        sent.setdefault(name, []).append([r.token_ids for r in requests])
        side = PLAYED[name]
        late = 0.1 + max(0.0, rate / side.capacity - 1) * 50
        tokens = (late, late + side.stall_s, *(late + side.stall_s + 0.01 * n for n in range(1, 31)))
        return [
            Outcome(num_prompt_tokens=len(r.token_ids), max_tokens=r.max_tokens, token_s=tokens)
            for r in requests
        ]

    sent.clear()
    monkeypatch.setattr(goodput_sweep, "running", running)
    monkeypatch.setattr(goodput_sweep, "offer", offer)
    return measured


def sweep_of(tmp_path: Path, rounds: int, said: list[str]) -> Sweep:
    plan = SweepPlan(
        products=(OURS,),
        controls=tuple(CONTROLS),
        rate=2.0,
        rates=(1.2, 1.6, 2.0, 2.4, 3.5),
        rounds=rounds,
        window_s=100.0,
        num_finalists=2,
        seed=0,
        bounds=Bounds(),
        objectives=Objectives(),
    )
    workload = Workload(mix=MIXES["80/15/5"], vocab_size=300)
    return Sweep(plan=plan, workload=workload, model="tiny", folder=tmp_path, report=said.append)


async def test_a_sweep_finds_each_sides_goodput(tmp_path: Path, played: list[tuple[str, float]]) -> None:
    said: list[str] = []
    sweep = sweep_of(tmp_path, 2, said)

    await sweep.run()

    assert sweep.goodputs == {
        OURS.name: [3.5, 3.5],
        "colocated 2 x 1 thread, chunk 128": [2.4, 2.4],
        "colocated 2 x 1 thread, chunk 256": [2.4, 2.4],
    }
    beyond = f"{OURS.name}: goodput is beyond the highest rate; choose another --rate or --step"
    assert [line for line in said if "beyond" in line] == [beyond] * 2
    assert facts(sweep)["goodput_beyond_the_rates"] == [OURS.name]
    found = {row.metric: row for row in rows(sweep)}
    ours = found[f"80/15/5: goodput {OURS.name}"]
    assert ours.ratio == pytest.approx(3.5 / 2.4)
    assert (ours.peer_name, ours.runs) == ("colocated 2 x 1 thread, chunk 128", 2)
    worst = found[f"80/15/5 at 2/s: worst itl {OURS.name}"]
    assert worst.ratio == pytest.approx(12.0)
    # The unchunked control: once in the screen, and once a round.
    assert sum(window.side == worst.peer_name for window in sweep.windows) == 3


async def test_sides_take_turns_with_the_same_requests(
    tmp_path: Path, played: list[tuple[str, float]]
) -> None:
    sweep = sweep_of(tmp_path, 1, [])

    await sweep.run()

    names = [name for name, _ in played]
    assert names[:5] == [side.name for side in CONTROLS]
    assert names[5] == "colocated 2 x 1 thread, whole"
    finalists = [OURS.name, "colocated 2 x 1 thread, chunk 128", "colocated 2 x 1 thread, chunk 256"]
    assert names[6:12] == finalists * 2
    # In the first window of the round all have the same prompts; no cluster sees a prompt twice.
    first = [sent[OURS.name][0], *(sent[name][1] for name in finalists[1:])]
    assert first[0] == first[1] == first[2]
    seen = [prompt for window in sent[OURS.name] for prompt in window]
    assert len(set(seen)) == len(seen)
    assert facts(sweep)["goodput_pooled"][OURS.name] == 3.5  # type: ignore[index]


def test_the_least_strained_controls_go_on() -> None:
    assert best_controls([], CONTROLS[:1], 2) == CONTROLS[:1]
