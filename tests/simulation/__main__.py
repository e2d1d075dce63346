"""`python -m tests.simulation --seed N` or `--seeds A-B`: simulates a cluster per seed.

--result FILE writes what the seeds came to, with the date and the machine. --keep NAME writes a
seed's plan to tests/simulation/failed_once, where the suite replays it for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.report import hardware
from tests.simulation.kept_plan import keep
from tests.simulation.plan import draw
from tests.simulation.seeds import Record, Summary, process_pool, simulate
from tests.simulation.sometimes import POINTS


def main() -> int:
    """Returns 1 if a seed failed."""
    options = _options()
    if options.keep is not None:
        print(keep(draw(options.seeds[0], options.requests), options.keep))
        return 0

    def told(record: Record) -> None:
        if record.defects:
            print(record.report, flush=True)
        if options.verbose or len(options.seeds) == 1:
            print(record.line, flush=True)

    with process_pool(min(options.jobs, len(options.seeds))) as pool:
        summary = simulate(
            pool, options.seeds, num_requests=options.requests, shrinks=options.shrink, told=told
        )
    print(summary)
    print("  ".join(f"{name} {count}" for name, count in summary.outcomes.most_common()))
    for point in POINTS:
        print(f"{summary.sometimes[point]:7d}  {point}")
    if options.result is not None:
        options.result.write_text(json.dumps(_document(options, summary), indent=1) + "\n", encoding="utf-8")
    return 1 if summary.failed else 0


def _document(options: argparse.Namespace, summary: Summary) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jobs": options.jobs,
        "first_seed": options.seeds[0],
        "last_seed": options.seeds[-1],
        "num_seeds": summary.num_seeds,
        "failures": {record.seed: list(record.defects) for record in summary.failed},
        "seeds_per_cpu_s": round(summary.num_seeds / summary.cpu_s, 3),
        "seeds_per_wall_s": round(summary.num_seeds / summary.wall_s, 3),
        "outcomes": dict(summary.outcomes.most_common()),
        "sometimes": {point: summary.sometimes[point] for point in POINTS},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--seeds", default="0-9", help="first and last seed, A-B")
    parser.add_argument("--requests", type=int, help="requests per seed; drawn from the seed by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; one per core")
    parser.add_argument("--result", type=Path, metavar="FILE", help="where to write the result as JSON")
    parser.add_argument("--keep", metavar="NAME", help="keep the seed's plan for the suite, and run nothing")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="do not shrink failures")
    parser.add_argument("--verbose", action="store_true", help="one line per seed")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    options.seeds = [options.seed] if options.seed is not None else range(int(first), int(last or first) + 1)
    return options


if __name__ == "__main__":
    sys.exit(main())
