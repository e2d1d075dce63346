"""`python -m tests.simulation --seed N [--requests R]` or `--seeds A-B`: simulates a cluster per seed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.plan import draw
from tests.simulation.run import Result, report, run, shrink
from tests.simulation.sometimes import POINTS


def main() -> int:
    """Returns 1 if a seed failed."""
    options = _options()
    totals, started, failed = Counter[str](), time.process_time(), 0
    outcomes = Counter[str]()
    for seed in options.seeds:
        result = run(draw(seed, options.requests))
        totals += result.sometimes
        outcomes += result.outcomes
        if len(options.seeds) == 1 or options.verbose:
            print(_line(result))
        if result.defects:
            failed += 1
            print(report(result, shrink(result.plan) if options.shrink else None))
    cpu_s = time.process_time() - started
    print(f"{len(options.seeds)} seeds, {failed} failed, {len(options.seeds) / cpu_s:.2f} seeds/s of CPU")
    print("  ".join(f"{name} {count}" for name, count in outcomes.most_common()))
    for point in POINTS:
        print(f"{totals[point]:7d}  {point}")
    return 1 if failed else 0


def _line(result: Result) -> str:
    outcomes = "  ".join(f"{name} {count}" for name, count in sorted(result.outcomes.items()))
    return (
        f"seed {result.plan.seed}: {result.num_events} events, trace {result.digest}, "
        f"{len(result.plan.faults)} faults, {result.num_resumes} resumes; {outcomes}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--seeds", default="0-9", help="first and last seed, A-B")
    parser.add_argument("--requests", type=int, help="requests per seed; drawn from the seed by default")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="do not shrink failures")
    parser.add_argument("--verbose", action="store_true", help="one line per seed")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    options.seeds = [options.seed] if options.seed is not None else range(int(first), int(last or first) + 1)
    return options


if __name__ == "__main__":
    sys.exit(main())
