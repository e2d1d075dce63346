"""The course of a chaos run: series of faults at once, and what became of the questions under each.

A series waits until the cluster is whole again for its role before its next fault, so there is always
another of each role; and a fault waits while it would close the last way through the cluster.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.integration.chaos_faults import Edge, Fault, leave_a_way
from tests.integration.chaos_load import Load, Record
from tests.integration.process_cluster import DECODE, PREFILL, ProcessCluster

WHOLE_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault as it went: from its begin until answers came again, on the loop's clock."""

    kind: str
    begun_at: float
    whole_at: float

    def had(self, record: Record) -> bool:
        """Whether the question was under way during the fault."""
        return record.asked_at <= self.whole_at and record.ended_at >= self.begun_at


@dataclass
class Storm:
    """Brings the faults down on a cluster under load."""

    cluster: ProcessCluster
    load: Load
    strikes: list[Strike] = field(default_factory=list)
    _broken: set[Edge] = field(default_factory=set)

    async def run(self, drawn: Mapping[str, Sequence[Fault]]) -> None:
        async with asyncio.TaskGroup() as group:
            for role, faults in drawn.items():
                group.create_task(self._series(role, faults), name=f"series {role}")

    async def _series(self, role: str, faults: Sequence[Fault]) -> None:
        """One fault after the other; one that would leave no way now comes again later."""
        deck = deque(faults)
        while deck:
            fault = deck.popleft()
            aim = await fault.aim(self.cluster)
            breaks = fault.breaks(aim)
            if leave_a_way(self._broken | breaks):
                self._broken |= breaks
                await self._strike(role, fault, aim)
                self._broken -= breaks
            else:
                deck.append(fault)
                await asyncio.sleep(0.05)

    async def _strike(self, role: str, fault: Fault, aim: str) -> None:
        begun_at = asyncio.get_running_loop().time()
        print(f"{begun_at:.2f} {fault.kind}: {aim}")
        await fault.strike(self.cluster, aim)
        await self._recover(role)
        self.strikes.append(Strike(fault.kind, begun_at, asyncio.get_running_loop().time()))

    async def _recover(self, role: str) -> None:
        """What the other roles lack meanwhile is their own series' business."""
        match role:
            case "prefill":
                await self.cluster.wait_ready(PREFILL, WHOLE_WITHIN_S)
            case "decode":
                await self.cluster.wait_ready(DECODE, WHOLE_WITHIN_S)
            case "router":
                await self.cluster.wait_able(WHOLE_WITHIN_S)
        await self.load.progress()


@dataclass(frozen=True, slots=True)
class Row:
    """The questions under one kind of fault. A question under several counts for each."""

    kind: str
    num_strikes: int
    attempted: int
    ok: int
    resumed: int
    failed: int
    wrong: int


def summary(
    strikes: Sequence[Strike], records: Sequence[Record], is_right: Callable[[Record], bool]
) -> list[Row]:
    """One row per kind of fault, in the order of their names, and one for all questions."""

    def row(kind: str, num_strikes: int, asked: Sequence[Record]) -> Row:
        answered = [record for record in asked if record.failure is None]
        right = [record for record in answered if is_right(record)]
        return Row(
            kind=kind,
            num_strikes=num_strikes,
            attempted=len(asked),
            ok=len(right),
            resumed=sum(record.was_resumed for record in right),
            failed=len(asked) - len(answered),
            wrong=len(answered) - len(right),
        )

    rows = []
    for kind in sorted({strike.kind for strike in strikes}):
        of_kind = [strike for strike in strikes if strike.kind == kind]
        asked = [record for record in records if any(strike.had(record) for strike in of_kind)]
        rows.append(row(kind, len(of_kind), asked))
    return [*rows, row("all", len(strikes), records)]


def format_rows(rows: Sequence[Row]) -> str:
    """The table as it is printed."""
    lines = [f"{'fault':30}{'strikes':>9}{'attempted':>11}{'ok':>6}{'resumed':>9}{'failed':>8}{'wrong':>7}"]
    lines += [
        f"{row.kind:30}{row.num_strikes:9}{row.attempted:11}{row.ok:6}{row.resumed:9}{row.failed:8}{row.wrong:7}"
        for row in rows
    ]
    return "\n".join(lines)
