"""`python -m router.replay LOG`: recorded traffic again, in virtual time, under other policies.

Arrivals, lengths and shared prefixes come from the log, and so do the workers; what computing costs is what
the router's cost model had learned by the end of the run. It needs no cluster, no model and no torch.
"recorded" is what was measured; all others are simulated, so compare those with each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.errors import BatonError
from router.offline.cost_policy import CostPolicy
from router.offline.policy import Policy
from router.offline.recorded_costs import RecordedCosts
from router.offline.recording import Outcome, Recording
from router.offline.report import Figures, table
from router.offline.simple_policies import Fifo, LeastTokens, Random, RoundRobin, StaticBuckets
from router.offline.simulated_fleet import SimulatedFleet

RECORDED = "recorded"
_EXIT_USAGE = 2

# A policy is made anew for each run: it remembers.
POLICIES: dict[str, Callable[[Recording, random.Random], Policy]] = {
    CostPolicy.name: lambda recording, rng: CostPolicy(recording.settings, rng=rng),
    LeastTokens.name: lambda _recording, _rng: LeastTokens(),
    RoundRobin.name: lambda _recording, _rng: RoundRobin(),
    Random.name: lambda _recording, rng: Random(rng),
    StaticBuckets.name: lambda recording, _rng: StaticBuckets(recording.settings["bucket_edges"]),
    Fifo.name: lambda _recording, _rng: Fifo(),
}


def outcomes_under(policy: str, recording: Recording, *, seed: int = 0) -> list[Outcome]:
    """What becomes, or became, of the recorded requests, in order of their arrival.

    policy: a name of POLICIES, or "recorded". Raises ConfigError for a request that fits no worker.
    """
    if policy == RECORDED:
        return list(recording.measured)
    fleet = SimulatedFleet(recording.workers, RecordedCosts(recording.costs))
    return fleet.run(recording.requests, POLICIES[policy](recording, random.Random(seed)))


def replay(recording: Recording, policies: Sequence[str], *, seed: int = 0) -> list[Figures]:
    """The figures of each policy, in the order given."""
    prefills = [worker.name for worker in recording.workers if worker.role == "prefill"]
    return [
        Figures.of(
            policy,
            outcomes_under(policy, recording, seed=seed),
            itl_objective_ms=recording.settings["itl_objective_ms"],
            computing=prefills or [worker.name for worker in recording.workers],
        )
        for policy in policies
    ]


def main() -> None:
    """Entry point. Exit code 2: wrong usage, or a log that cannot be replayed."""
    arguments = _parser().parse_args()
    try:
        recording = Recording.read(arguments.log)
        figures = replay(recording, arguments.policy or [RECORDED, *POLICIES], seed=arguments.seed)
    except BatonError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(_EXIT_USAGE)
    if arguments.json:
        text = json.dumps(
            {
                "num_requests": len(recording.requests),
                "num_left_out": recording.num_left_out,
                "policies": [dataclasses.asdict(row) for row in figures],
            }
        )
    else:
        text = "\n".join([*_heading(recording), *table(figures)])
    sys.stdout.write(text + "\n")


def _heading(recording: Recording) -> list[str]:
    prefills = sum(worker.role == "prefill" for worker in recording.workers)
    seconds = recording.requests[-1].arrived_at - recording.requests[0].arrived_at
    return [
        f"{len(recording.requests)} requests in {seconds:.0f} s, {prefills} prefill and "
        f"{len(recording.workers) - prefills} decode workers; {recording.num_left_out} requests without an "
        "answer are left out",
        "",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router.replay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("log", type=Path, metavar="LOG", help="what the router's setting decision_log names")
    names = (RECORDED, *POLICIES)
    parser.add_argument(
        "--policy", action="append", choices=names, help="may be given more than once; default: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random choices (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    main()
