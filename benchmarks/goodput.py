"""Goodput under open-loop load: `python -m benchmarks.goodput [--quick] [--headline] [--minutes M]`.

Disaggregated against colocated at equal cores, or, with --headline, buckets and packing against padding.
benchmarks/README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from baton.bench.arrivals import DEFAULT_CV
from baton.bench.target import Bounds
from baton.bench.trace_file import read_trace
from baton.cluster.config import usable_cores
from baton.cluster.defaults import DEFAULT_MODEL
from baton.errors import ModelError
from baton.models import ModelDir
from benchmarks import goodput_plot, goodput_rows, goodput_sweep, headline
from benchmarks.attainment import Objectives
from benchmarks.goodput_sides import DISAGGREGATED, control_sides, product_sides
from benchmarks.goodput_sweep import Sweep, SweepPlan
from benchmarks.headline import NUM_CALIBRATION, QUICK_CALIBRATION, Headline
from benchmarks.rate_search import ladder
from benchmarks.report import RESULTS, publish
from benchmarks.workload import MIXES, Workload

# The middle rate of each mix, requests/s: near what two cores of today can do.
RATES = {"70/30": 0.8, "80/15/5": 2.0}
HEADLINE_MIX = "80/15/5"
QUICK_SIDES = ("disaggregated", "colocated 2 x 1 thread, chunk 128")
QUICK_MINUTES = 1.2
# 2^n - 1 rates are told apart by n windows of each side.
NUM_PROBES, QUICK_PROBES = 4, 2


async def run_sweep(sweep: Sweep, arguments: argparse.Namespace) -> None:
    """Measures and publishes the sweep."""
    rates = sweep.plan.rates
    _say(f"windows of {sweep.plan.window_s:.0f} s, rates {rates[0]:.2f} to {rates[-1]:.2f}/s")
    await sweep.run()
    found = goodput_rows.rows(sweep)
    facts = {**_versions(), "rounds": arguments.rounds, **goodput_rows.facts(sweep)}
    kept = publish("goodput", found, arguments.json, folder=arguments.results, **facts)
    plot = goodput_plot.draw(sweep, kept.with_suffix(".svg"))
    print(f"kept as {kept} and {plot}")


async def run_headline(measured: Headline, arguments: argparse.Namespace) -> None:
    """Measures and publishes row 20."""
    _say(f"windows of {measured.window_s:.0f} s")
    await measured.run()
    facts = {**_versions(), **measured.facts()}
    kept = publish("headline", measured.rows(), arguments.json, folder=arguments.results, **facts)
    print(f"kept as {kept}")


def _sweep(arguments: argparse.Namespace, folder: Path) -> Sweep:
    workload = _workload(arguments)
    plan = _plan(arguments, workload)
    return Sweep(plan=plan, workload=workload, model=arguments.model, folder=folder, report=_say)


def _headline(arguments: argparse.Namespace, folder: Path) -> Headline:
    num_calibration = QUICK_CALIBRATION if arguments.quick else NUM_CALIBRATION
    return Headline(
        workload=_workload(arguments),
        model=arguments.model,
        folder=folder,
        threads=arguments.threads,
        batch_size=arguments.batch_size,
        rounds=arguments.rounds,
        window_s=headline.window_s(arguments.minutes, arguments.rounds, num_calibration),
        num_calibration=num_calibration,
        seed=arguments.seed,
        report=_say,
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    model = ModelDir.open(arguments.model)
    workload = Workload(
        mix=MIXES[arguments.mix],
        vocab_size=model.vocab_size,
        max_tokens=1 if arguments.headline else arguments.max_tokens,
        cv=arguments.cv if arguments.arrivals == "bursty" else 1.0,
        trace=tuple(read_trace(arguments.trace)) if arguments.trace else (),
        max_prompt_tokens=arguments.max_prompt_tokens,
    )
    if workload.longest + workload.max_tokens > model.max_model_len:
        raise ValueError(
            f"prompts have up to {workload.longest} tokens and answers {workload.max_tokens}; the model "
            f"takes {model.max_model_len} together"
        )
    return workload


def _plan(arguments: argparse.Namespace, workload: Workload) -> SweepPlan:
    sides = [*product_sides(), *control_sides(workload.longest)]
    chosen = [side for side in sides if side.name.startswith(tuple(arguments.sides))]
    if not chosen:
        raise ValueError(f"no side begins like that; there are {'; '.join(side.name for side in sides)}")
    products = tuple(side for side in chosen if not side.is_control)
    controls = tuple(side for side in chosen if side.is_control)
    rate = arguments.rate or RATES[arguments.mix]
    num_probes = QUICK_PROBES if arguments.quick else NUM_PROBES
    window_s = goodput_sweep.window_s(
        arguments.minutes,
        num_products=len(products),
        controls=controls,
        finalists=arguments.finalists,
        rounds=arguments.rounds,
        num_probes=num_probes,
    )
    return SweepPlan(
        products=products,
        controls=controls,
        rate=rate,
        rates=tuple(ladder(rate, arguments.step, num_probes)),
        rounds=arguments.rounds,
        window_s=window_s,
        num_finalists=arguments.finalists,
        seed=arguments.seed,
        bounds=Bounds(max_in_flight=arguments.max_in_flight, deadline_s=arguments.deadline_s),
        objectives=Objectives(
            ttft_base_s=arguments.ttft_base_s,
            ttft_per_token_s=arguments.ttft_per_token_s,
            mean_itl_s=arguments.itl_s,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two sides, one round, short windows: does it run at all?")
    add("--headline", action="store_true", help="row 20 instead of the sweep")
    add("--minutes", type=float, default=15.0, help="about how long the run takes")
    add("--rounds", type=int, default=1, help="medians are over so many rounds, each with its own seed")
    add("--model", default=DEFAULT_MODEL, help="a pulled model's name, or a folder")
    add("--seed", type=int, default=0, help="of times, lengths and tokens")
    add("--results", type=Path, default=RESULTS, help="folder for the dated copy and the plot")
    add("--json", help="write the rows here")
    _add_load(parser.add_argument_group("load"))
    _add_sweep(parser.add_argument_group("sweep"))
    _add_headline(parser.add_argument_group("headline"))
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mix", choices=sorted(MIXES), help="prompt lengths; default 70/30, with --headline 80/15/5")
    add("--arrivals", choices=("poisson", "bursty"), default="poisson", help="gaps between requests")
    add("--cv", type=float, default=DEFAULT_CV, help="coefficient of variation of bursty gaps")
    add("--trace", type=Path, help="CSV or JSON lines, may be gzipped: times and lengths instead of the mix")
    add("--max-prompt-tokens", type=int, default=2000, help="longer prompts of a trace are cut to it")
    add("--max-tokens", type=int, default=32, help="of an answer; a trace may ask for fewer")


def _add_sweep(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rate", type=float, help="middle rate, requests/s; default 0.8 for 70/30 and 2 for 80/15/5")
    add("--step", type=float, default=1.15, help="between neighbouring rates of the 15 that are told apart")
    add("--sides", nargs="+", default=(DISAGGREGATED, "colocated"), help="names or their beginnings")
    add("--finalists", type=int, default=2, help="controls whose goodput is sought, the best of the screen")
    add("--ttft-base-s", type=float, default=0.5, help="objective of the time to the first token")
    add("--ttft-per-token-s", type=float, default=0.003, help="and for each prompt token")
    add("--itl-s", type=float, default=0.150, help="objective of the mean time between tokens")
    add("--max-in-flight", type=int, default=64, help="what is due beyond counts as failed")
    add("--deadline-s", type=float, default=20.0, help="a request ends so long after it was due")


def _add_headline(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--threads", type=int, default=usable_cores(), help="of either side's prefill")
    add("--batch-size", type=int, default=4, help="prompts of a padded batch")


def _parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    arguments.mix = arguments.mix or (HEADLINE_MIX if arguments.headline else "70/30")
    if arguments.quick:
        arguments.sides, arguments.minutes, arguments.rounds = QUICK_SIDES, QUICK_MINUTES, 1
    if arguments.trace and not arguments.rate and not arguments.headline:
        parser.error("--trace needs --rate: the middle rate, in requests/s")
    return arguments


def _versions() -> dict[str, object]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "baton": version("baton-serve"),
        "cores": usable_cores(),
    }


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Entry point."""
    parser = _parser()
    arguments = _parse(parser)
    with tempfile.TemporaryDirectory(prefix="baton-goodput-") as name:
        try:
            folder = Path(name)
            running = (
                run_headline(_headline(arguments, folder), arguments)
                if arguments.headline
                else run_sweep(_sweep(arguments, folder), arguments)
            )
        except (ValueError, OSError, ModelError) as error:
            parser.error(str(error))
        asyncio.run(running)


if __name__ == "__main__":
    main()
