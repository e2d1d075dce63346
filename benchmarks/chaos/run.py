"""One chaos run from start to verdict: undisturbed answers, load, faults, and what is left in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.load import Case, Load, Question, Record
from benchmarks.chaos.oracle import Oracle
from benchmarks.chaos.plan import Plan
from benchmarks.chaos.rig import ROUTERS, WORKERS, Rig, chaos_rig
from benchmarks.chaos.storm import WHOLE_WITHIN_S, Storm, Strike
from benchmarks.chaos.summary import FaultRow, summary
from benchmarks.ledgers import Ledgers, settled
from benchmarks.process_watch import ProcessWatch

SETTLED_WITHIN_S = 5.0
_NUM_AFTERWARDS = 4
_ROUNDS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run found.

    rows: one per kind of fault, and the last one for all questions.
    calm_rate: answers per second before the first fault.
    held: what each process held in the end, where that was not zero.
    """

    rows: list[FaultRow]
    strikes: list[Strike]
    records: list[Record]
    calm_rate: float
    held: dict[str, dict[str, int]]
    peak_rss_mib: dict[str, float]
    complaints: list[str]


async def run_chaos(plan: Plan, folder: Path) -> Outcome:
    """Runs the plan on a cluster of its own; the folder is for settings and logs."""
    oracle = Oracle(plan.reference)
    rig_of_plan = chaos_rig(
        plan.model, folder, ray=plan.ray, settings=plan.settings, prefix_cache=plan.prefix_cache
    )
    async with rig_of_plan as rig:
        await rig.wait_whole(WORKERS, WHOLE_WITHIN_S)
        load = Load(rig.routers, plan.mix, plan.seed)
        # In a thread: the proxies' bytes must not wait for transformers.
        await asyncio.to_thread(oracle.learn, await _ask_all(load, plan.mix.cases))
        await rig.wait_whole(WORKERS, WHOLE_WITHIN_S)
        print("undisturbed answers are right; the load begins", flush=True)
        async with ProcessWatch(rig.find_pids, every_s=2.0) as watch:
            storm, calm_rate = await _disturb(plan, rig, load)
            await rig.wait_whole(WORKERS, WHOLE_WITHIN_S)
            afterwards = await _ask_afterwards(load, plan.mix.cases)
        held = await _held_in_the_end(rig)
    records = [*load.records, *afterwards]
    rows = summary(storm.strikes, records, oracle.is_right)
    return Outcome(
        rows=rows,
        strikes=storm.strikes,
        records=records,
        calm_rate=calm_rate,
        held={name: counts for name, counts in held.items() if counts},
        peak_rss_mib=watch.peak_rss_mib(),
        complaints=_complaints(plan, rows, calm_rate, held, storm),
    )


async def _disturb(plan: Plan, rig: Rig, load: Load) -> tuple[Storm, float]:
    """Load, then faults; returns what struck, and the rate of answers before."""
    storm = Storm(rig, load)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(), name="load")
        await load.progress()
        num_before = load.num_answers
        await asyncio.sleep(plan.calm_s)
        calm_rate = (load.num_answers - num_before) / plan.calm_s
        print(f"{calm_rate:.1f} answers/s before the first fault", flush=True)
        await storm.run(plan.lanes, plan.seconds, plan.seed)
        load.is_stopped = True
    return storm, calm_rate


async def _ask_all(load: Load, cases: Sequence[Case]) -> list[Record]:
    """Every case once, a few at a time."""
    slots = asyncio.Semaphore(_ROUNDS_AT_ONCE)

    async def ask(case: Case) -> Record:
        async with slots:
            return await load.ask(Question(case=case), list(load.routers))

    return list(await asyncio.gather(*(ask(case) for case in cases)))


async def _ask_afterwards(load: Load, cases: Sequence[Case]) -> list[Record]:
    """Some cases at each router by itself: all of them must answer, and not one for the other."""
    return [
        await load.ask(Question(case=case), [address])
        for address in load.routers
        for case in cases[:_NUM_AFTERWARDS]
    ]


async def _held_in_the_end(rig: Rig) -> Ledgers:
    """What each process still holds, once none does or the time for it is over; zeros are left out."""

    async def read() -> Ledgers:
        ledgers = await rig.ledgers()
        return {
            name: {what: count for what, count in counts.items() if count} for name, counts in ledgers.items()
        }

    return await settled(read, lambda held: not any(held.values()), SETTLED_WITHIN_S)


def _complaints(
    plan: Plan, rows: Sequence[FaultRow], calm_rate: float, held: Ledgers, storm: Storm
) -> list[str]:
    """Why the run does not count, or was not passed; empty if it does and was."""
    whole = rows[-1]
    found = []
    if calm_rate < plan.least_rate:
        found.append(f"{calm_rate:.2f} answers/s before the first fault; {plan.least_rate} is the least")
    if whole.num_failed:
        found.append(f"{whole.num_failed} questions failed: {whole.failed}")
    if whole.wrong:
        found.append(f"{whole.wrong} answers are wrong")
    found += [f"{name} still holds {counts}" for name, counts in held.items() if counts]
    missing = {*ROUTERS, *WORKERS} - set(held)
    if missing:
        found.append(f"not back in the end: {', '.join(sorted(missing))}")
    found += storm.complaints
    found += [f"{row.kind}: nobody had asked anything" for row in rows if not row.attempted]
    return found
