"""The course of a chaos run: kinds that struck nobody are named, and detection ends at the notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.load import Load
from benchmarks.chaos.rig import DECODE, PREFILL, Rig
from benchmarks.chaos.sight import Edge
from benchmarks.chaos.storm import Lane, Storm

AT_ONCE_S = 1e-6


class NoRig(Rig):
    """Faults of this module ask nothing of it."""

    def __init__(self) -> None:
        pass


class Answering(Load):
    """Answers come all the time."""

    def __init__(self) -> None:
        pass

    async def progress(self) -> None:
        """At once."""


@dataclass(frozen=True)
class Feint:
    """Strikes its edge, and does nothing."""

    kind: str
    edge: Edge | None
    is_breaking: bool = False
    noticed_after_s: float = AT_ONCE_S

    def aim(self, _rig: Rig) -> Edge | None:
        return self.edge

    async def strike(self, _rig: Rig, _edge: Edge) -> None:
        pass

    async def recover(self, _rig: Rig, _edge: Edge, _within_s: float) -> None:
        pass

    def noticed_at(self, _rig: Rig, _load: Load, _edge: Edge, since: float) -> float:
        return since + self.noticed_after_s


def lane(name: str, *faults: Feint) -> Lane:
    return Lane(name=name, deck=lambda _rng: cast("list[Fault]", list(faults)), every_s=0.01)


async def storm_of(*lanes: Lane, seconds: float) -> Storm:
    storm = Storm(NoRig(), Answering())
    await storm.run(list(lanes), seconds, seed=1)
    return storm


async def test_lanes_and_kinds_that_struck_nobody_are_named() -> None:
    hit, missed = Feint("hit", (DECODE[0], DECODE[0])), Feint("missed", None)
    storm = await storm_of(lane("busy", hit, missed), lane("idle", missed), seconds=0.2)
    assert {strike.kind for strike in storm.strikes} == {"hit"}
    assert storm.complaints == [
        "missed: it never struck",
        "idle: not one fault was dealt",
        "missed: it never struck",
    ]
    # One that waits for somebody busy does not hold up the decks that follow.
    assert len(storm.strikes) > 4


async def test_a_short_run_need_not_have_struck_everything() -> None:
    kinds = [Feint(f"fault {index}", (PREFILL[0], DECODE[0])) for index in range(40)]
    storm = await storm_of(lane("busy", *kinds), seconds=0.2)
    assert 0 < len(storm.strikes) < 40
    assert storm.complaints == []


async def test_detection_lasts_until_somebody_knew_and_not_until_it_is_asked() -> None:
    edge = DECODE[0], DECODE[0]
    storm = await storm_of(lane("busy", Feint("hit", edge)), seconds=0.1)
    assert {round(strike.detected_s or 0.0, 7) for strike in storm.strikes} == {AT_ONCE_S}
    # By then the victim was long of use again, so it is another fault that is noticed.
    late = await storm_of(lane("busy", Feint("hit", edge, noticed_after_s=60.0)), seconds=0.1)
    assert {strike.detected_s for strike in late.strikes} == {None}
