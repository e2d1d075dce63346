"""Breaks a cluster under load and counts what it loses: `python -m benchmarks.chaos --minutes 5 --seed 1`.

Two routers, two prefill workers and two decode workers (actors on a local Ray, unless --no-ray), with a proxy
in front of each. Exits with 0 if no question failed, no token was wrong, every process is back, and none
holds anything in the end; with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.chaos.plan import Plan, real_plan, tiny_plan
from benchmarks.chaos.run import Outcome, run_chaos
from benchmarks.chaos.summary import Span, format_rows
from benchmarks.report import RESULTS, Row, publish

# Dynamo's published table of fault tolerance, the row with 4 replicas: lost of 800, and its recovery.
DYNAMO = "Dynamo's table"
DYNAMO_LOST = 4 / 800
DYNAMO_RECOVERY_S = 44.9
# What an answer may wait where another worker is there.
RECOVERY_S = 3.0


def report_rows(outcome: Outcome) -> list[Row]:
    """What is compared with the published numbers; everything else is in the table of faults."""
    whole = outcome.rows[-1]
    lost = whole.num_failed / max(1, whole.attempted)
    rows = [
        Row(
            metric="questions lost",
            unit="share",
            ours=lost,
            runs=whole.attempted,
            peer=DYNAMO_LOST,
            peer_name=DYNAMO,
            ratio=DYNAMO_LOST / lost if lost else None,
        ),
        Row(metric="wrong answers", unit="answers", ours=whole.wrong, runs=whole.attempted),
        Row(metric="answers before the first fault", unit="1/s", ours=outcome.calm_rate, runs=1),
    ]
    kills = [row for row in outcome.rows if row.kind.startswith("kill ")]
    back = [row.whole for row in kills if row.whole]
    waits = [row.recovery for row in kills if row.recovery]
    rows += _longest("longest time until a killed process serves again", back, DYNAMO, DYNAMO_RECOVERY_S)
    rows += _longest("longest wait of an answer after a kill", waits, "what is wanted", RECOVERY_S)
    return rows


def _longest(metric: str, spans: list[Span], peer_name: str, peer: float) -> list[Row]:
    """The longest of all, which is to be no longer than the peer's; nothing where nothing was measured."""
    if not spans:
        return []
    ours = max(span.max_s for span in spans)
    return [
        Row(
            metric=metric,
            unit="s",
            ours=ours,
            runs=sum(span.count for span in spans),
            peer=peer,
            peer_name=peer_name,
            ratio=peer / ours,
            target=1.0,
        )
    ]


def _plan(arguments: argparse.Namespace, folder: Path) -> Plan:
    common = {"seed": arguments.seed, "seconds": 60 * arguments.minutes, "ray": arguments.ray}
    clients = {} if arguments.clients is None else {"num_clients": arguments.clients}
    if arguments.real:
        return real_plan(**common, **clients)
    return tiny_plan(folder, **common, **clients)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are dealt")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and of the questions")
    parser.add_argument("--real", action="store_true", help="SmolLM2 in fp32, kills and stops only")
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True, help="decode on Ray")
    parser.add_argument("--clients", type=int, help="that ask one question after the other")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the dated result")
    parser.add_argument("--logs", type=Path, help="folder of the logs, which is kept")
    return parser.parse_args()


def main() -> int:
    """Entry point; returns the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as scratch:
        folder = Path(scratch)
        plan = _plan(arguments, folder)
        outcome = asyncio.run(run_chaos(plan, arguments.logs or folder))
    print(format_rows(outcome.rows))
    kept = publish(
        "chaos-real" if arguments.real else "chaos",
        report_rows(outcome),
        None,
        folder=arguments.out,
        seed=arguments.seed,
        minutes=arguments.minutes,
        clients=plan.mix.num_clients,
        ray=arguments.ray,
        faults=[asdict(row) for row in outcome.rows],
        peak_rss_mib=outcome.peak_rss_mib,
        complaints=outcome.complaints,
    )
    print(f"peak RSS in MiB: {', '.join(f'{k} {v:.0f}' for k, v in outcome.peak_rss_mib.items())}")
    print(f"kept as {kept}")
    for complaint in outcome.complaints:
        print(f"NOT PASSED: {complaint}")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
