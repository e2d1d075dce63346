"""Entry point of `python -m benchmarks.engine [--threads N] [--rounds N] [SIDE ...]`.

Baton's engine, in plain torch and compiled too, against transformers and vLLM's CPU build: the same weights
in bfloat16, the same prompts, the same number of threads; each in a process of its own, asked in turns.
benchmarks/README.md says what the rows mean.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch

from baton.models import ModelDir
from baton.plan.costs import ModelCosts
from benchmarks.engine.ceilings import gemm_rate, read_rate
from benchmarks.engine.processes import COMPILED, OURS, PEERS, PLAIN, SIDES, VLLM, Side, SideError, started
from benchmarks.report import RESULTS, Row, publish

MODEL = "smollm2-135m-instruct"
FOLDER = Path("build/clients")
# Prompts whose first tokens are waited for, by the name of the row.
PREFILLS: Mapping[str, list[int]] = {"128": [128], "512": [512], "2048": [2048], "8 x 512": [512] * 8}
# Answers that run at once behind prompts of CONTEXT tokens, for STEPS tokens.
BATCHES = (1, 8, 32)
CONTEXT, STEPS = 512, 24
# The threads of the side before may go on looking for work for a while, and those of this one sleep.
PAUSE_S = 0.5
WAKING = (16,)
PREFILL_TARGET = 1.3
DECODE_TARGETS: Mapping[int, float] = {8: 2.0, 32: 2.2}

Times = dict[tuple[str, str], list[float]]


def main() -> int:
    arguments = _arguments()
    times: Times = defaultdict(list)
    missing: dict[str, str] = {}
    torch.set_num_threads(arguments.threads)
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="baton-engine-") as folder, ExitStack() as stack:
        model = ModelDir.open(arguments.model)
        sides = {}
        for name in arguments.sides or SIDES:
            print(f"{name}: loading", flush=True)
            try:
                side = started(
                    name, model, threads=arguments.threads, peers=arguments.folder, logs=Path(folder)
                )
                sides[name] = stack.enter_context(side)
            except SideError as error:
                missing[name] = str(error)
                print(error, file=sys.stderr)
        # The first round is for what is compiled or allocated at first use.
        for number in range(arguments.rounds + 1):
            into: Times = times if number else defaultdict(list)
            names = list(sides)
            into["gemm", ""].append(gemm_rate())
            into["read", ""].append(read_rate())
            for what, ask in _questions():
                # No side always comes behind the same other one.
                rng.shuffle(names)
                for name in names:
                    time.sleep(PAUSE_S)
                    sides[name].seconds(WAKING, 2)
                    into[what, name].append(ask(sides[name]))
            print(f"round {number} of {arguments.rounds}", flush=True)
    rows = _rows(times, model)
    facts = {"threads": arguments.threads, "model": arguments.model, "missing": missing}
    publish(f"engine-{arguments.threads}-threads", rows, arguments.json, folder=arguments.results, **facts)
    return 0


def _questions() -> Iterator[tuple[str, Callable[[Side], float]]]:
    """What is measured of a side: seconds of a prefill, and of a decode step."""
    for what, lengths in PREFILLS.items():
        yield f"prefill {what}", partial(_prefill_s, lengths)
    for batch in BATCHES:
        yield f"decode step of {batch}", partial(_step_s, batch)


def _prefill_s(lengths: Sequence[int], side: Side) -> float:
    return side.seconds(lengths, 1)


def _step_s(batch: int, side: Side) -> float:
    # CONTEXT tokens are there in the mean over the steps.
    lengths = [CONTEXT - STEPS // 2] * batch
    first = side.seconds(lengths, 1)
    return (side.seconds(lengths, 1 + STEPS) - first) / STEPS


def _rows(times: Times, model: ModelDir) -> list[Row]:
    runs = len(times["gemm", ""])
    gemm, read = median(times["gemm", ""]), median(times["read", ""])
    costs = ModelCosts.of(model.model_config)
    rows = [
        Row(metric="matrix product", unit="GFLOP/s", ours=gemm / 1e9, runs=runs),
        Row(metric="reading", unit="GB/s", ours=read / 1e9, runs=runs),
    ]
    for name, lengths in PREFILLS.items():
        what, tokens = f"prefill {name}", sum(lengths)
        rows += _compared(times, what, "tok/s", partial(_rate, tokens), dict.fromkeys(PEERS, PREFILL_TARGET))
        if (ours := _of(times, what).get(OURS)) is not None:
            share = sum(map(costs.prefill_flops, lengths)) / ours / gemm
            rows.append(Row(metric=f"{what}, of matrix product", unit="", ours=share, runs=runs))
    for batch in BATCHES:
        what = f"decode step of {batch}"
        targets = {VLLM: DECODE_TARGETS[batch]} if batch in DECODE_TARGETS else {}
        rows += _compared(times, what, "ms", _milliseconds, targets)
        if (ours := _of(times, what).get(OURS)) is not None:
            share = costs.decode_bytes(batch, CONTEXT) / ours / read
            rows.append(Row(metric=f"{what}, of reading", unit="", ours=share, runs=runs))
    return rows


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds


def _milliseconds(seconds: float) -> float:
    return 1000 * seconds


def _compared(
    times: Times, what: str, unit: str, shown: Callable[[float], float], targets: Mapping[str, float]
) -> Iterator[Row]:
    """A row per peer; one that is missing leaves its value and the ratio null."""
    found = _of(times, what)
    ours = found.get(OURS)
    for peer in (*PEERS, PLAIN, COMPILED):
        theirs = found.get(peer)
        yield Row(
            metric=what,
            unit=unit,
            ours=None if ours is None else shown(ours),
            peer=None if theirs is None else shown(theirs),
            peer_name=peer,
            ratio=None if ours is None or theirs is None else theirs / ours,
            runs=len(times.get((what, OURS), ())),
            target=targets.get(peer),
        )


def _of(times: Times, what: str) -> dict[str, float]:
    """Median seconds by side."""
    return {name: median(found) for (of, name), found in times.items() if of == what and name}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sides", nargs="*", choices=[[], *SIDES], help="which; all when none is named")
    parser.add_argument("--threads", type=int, default=2, help="of every side")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over these")
    parser.add_argument("--model", default=MODEL, help="a model of the catalogue")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments of peers are")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the dated copy")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
