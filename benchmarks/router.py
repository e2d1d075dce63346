"""The router with simulated workers: `python -m benchmarks.router [--quick] [--json FILE]`.

How long a decision takes, what the router adds to the time to the first token, and what a request and a token
cost it, with 1 to 256 workers. benchmarks/README.md says what the rows mean.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import router_plot
from benchmarks.report import RESULTS, publish
from benchmarks.router_cost import COSTS, OUTPUT_TOKENS, STREAMS, RoundSizes, Scale
from benchmarks.router_decision import Decisions, decisions
from benchmarks.router_load import LoadProcess
from benchmarks.router_rig import NotReady, Rig

WORKERS = (1, 4, 16, 64, 256)
QUICK_WORKERS = (1, 16)
QUICK_SIZES = RoundSizes(num_one=20, num_busy=40, num_short=96)
# More decisions than a garbage collection can hide in.
NUM_DECISIONS = 2_000
# Every request takes the long way, over both workers. The queue holds all of a load: nothing is refused.
SETTINGS = {"max_queue": "1024", "placement": "disaggregated"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What each scale is measured with."""

    load: LoadProcess
    rounds: int
    sizes: RoundSizes


async def measure(workers: Sequence[int], rounds: int, sizes: RoundSizes) -> list[Scale]:
    """The scales that could be measured, that of 1 worker first, which is measured beside every other."""
    plan = Plan(LoadProcess(), rounds, sizes)
    scales: list[Scale] = []
    try:
        with tempfile.TemporaryDirectory(prefix="baton-router-") as folder:
            async with Rig.open(Path(folder)) as rig, AsyncExitStack() as stack:
                first = rig.cluster(1, costs=COSTS, settings=SETTINGS, num_relayed=1)
                base = Scale.of(await stack.enter_async_context(first))
                scales.append(base)
                await _warm(base, plan.load)
                for num_workers in workers:
                    if num_workers > 1:
                        scales += await _beside(base, rig, num_workers, plan)
                if not base.router.request_us:
                    await _rounds(base, base, plan)
    finally:
        plan.load.close()
    return scales


async def _beside(base: Scale, rig: Rig, num_workers: int, plan: Plan) -> list[Scale]:
    """One scale, or none if the router does not get there."""
    try:
        async with rig.cluster(num_workers, costs=COSTS, settings=SETTINGS, num_relayed=STREAMS) as cluster:
            scale = Scale.of(cluster)
            await _warm(scale, plan.load)
            await _rounds(scale, base, plan)
            return [scale]
    except NotReady as error:
        print(error, flush=True)
        return []


async def _warm(scale: Scale, load: LoadProcess) -> None:
    warming = RoundSizes(num_one=5, num_busy=16, num_short=STREAMS, num_long=STREAMS // 4)
    for side in (scale.router, scale.control):
        side.round(load, warming, 0)
        side.forget()
    await scale.rest()


async def _rounds(scale: Scale, base: Scale, plan: Plan) -> None:
    for number in range(plan.rounds):
        print(f"{scale.router.num_workers} workers, round {number + 1} of {plan.rounds}", flush=True)
        base.round(plan.load, plan.sizes, number)
        if scale is not base:
            scale.round(plan.load, plan.sizes, number)
            scale.compared(base)
        # Others of this process have their turn: announcements, and the guard.
        await asyncio.sleep(0)


async def run(arguments: argparse.Namespace) -> None:
    """Measures and publishes."""
    sizes = QUICK_SIZES if arguments.quick else RoundSizes()
    workers = tuple(arguments.workers or (QUICK_WORKERS if arguments.quick else WORKERS))
    only = arguments.only
    scales = [] if only == "decision" else await measure(workers, arguments.rounds, sizes)
    decided = [] if only == "cost" else await _decisions(workers)
    rows = [row for scale in scales for row in scale.rows()] + [
        row for each in decided for row in each.rows()
    ]
    facts = {"rounds": arguments.rounds, "streams": STREAMS, "output_tokens": OUTPUT_TOKENS}
    kept = publish("router", rows, arguments.json, folder=arguments.results, **facts, **asdict(sizes))
    plot = router_plot.draw(scales, decided, kept.with_suffix(".svg"))
    print(f"kept as {kept} and {plot}")


async def _decisions(workers: Sequence[int]) -> list[Decisions]:
    return [await decisions(num_workers, NUM_DECISIONS) for num_workers in workers]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="1 and 16 workers, two rounds")
    parser.add_argument("--only", choices=("cost", "decision"), help="leave the other half out")
    parser.add_argument("--workers", type=int, nargs="*", help="numbers of workers beside 1")
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds of each measurement; default 3, quick 2"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for the dated copy and the plot"
    )
    parser.add_argument("--json", help="write the rows here")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 3)
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
