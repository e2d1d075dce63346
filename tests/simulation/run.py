"""Runs one seed, twice if asked, and shrinks what fails."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from dataclasses import dataclass

import torch

from tests.simulation.cluster import SimCluster
from tests.simulation.plan import Plan
from tests.simulation.virtual_loop import VirtualLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run came to.

    digest: equal for equal runs. outcomes: requests by how they ended.
    sometimes: points reached. timeline: the last events.
    """

    plan: Plan
    defects: tuple[str, ...]
    digest: str
    outcomes: Counter[str]
    sometimes: Counter[str]
    num_resumes: int
    num_events: int
    timeline: str


def run(plan: Plan) -> Result:
    """Runs a plan from beginning to end. Deterministic: no clock, no thread, no garbage collector."""
    torch.set_num_threads(1)
    # Attempts that are logged as failed are the purpose here.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.disable()
    loop = VirtualLoop()
    try:
        cluster = SimCluster(plan, loop)
        loop.run_until_complete(cluster.run())
        result = _result(cluster)
        loop.run_until_complete(cluster.dissolve())
        loop.run_until_complete(loop.shutdown_asyncgens())
        return result
    finally:
        loop.close()
        gc.enable()
        logging.disable(disabled)


def shrink(plan: Plan, budget: int = 40) -> Plan:
    """Leaves out fault after fault for as long as the plan still fails."""
    index = 0
    while index < len(plan.faults) and budget > 0:
        budget -= 1
        smaller = plan.without(index)
        if run(smaller).defects:
            plan = smaller
        else:
            index += 1
    return plan


def report(result: Result, smallest: Plan | None = None) -> str:
    """What a person needs to see of a failure."""
    plan = smallest or result.plan
    lines = [
        f"seed {plan.seed} failed; replay: python -m tests.simulation --seed {plan.seed}",
        *(f"  {defect}" for defect in result.defects),
        f"faults that it takes, of {len(result.plan.faults)}:",
        *(f"  {fault}" for fault in plan.faults),
        result.timeline,
    ]
    return "\n".join(lines)


def _result(cluster: SimCluster) -> Result:
    return Result(
        plan=cluster.plan,
        defects=tuple(cluster.defects),
        digest=cluster.trace.digest,
        outcomes=Counter(client.outcome or "pending" for client in cluster.clients),
        sometimes=cluster.sometimes.counts,
        num_resumes=cluster.sometimes.num_resumes,
        num_events=cluster.trace.num_events,
        timeline=cluster.trace.timeline() if cluster.defects else "",
    )


__all__ = ["Result", "report", "run", "shrink"]
