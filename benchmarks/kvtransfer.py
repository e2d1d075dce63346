"""The transfer layer: `python -m benchmarks.kvtransfer [--quick] [--json FILE]`.

How fast KV travels beside bare peers, how much of it is there before prefill has ended, and what that costs
prefill. benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import torch

from benchmarks import kv_hidden, kv_plot, kv_throughput
from benchmarks.report import RESULTS, publish
from engine.host_memory import keep_freed_memory


async def run(arguments: argparse.Namespace) -> None:
    """Measures and publishes."""
    torch.set_num_threads(1)
    keep_freed_memory()
    throughputs, peers = await _throughputs(arguments)
    hidden = await _hidden(arguments)
    rows = peers.rows() if throughputs else []
    rows += [throughput.row() for throughput in throughputs]
    rows += [row for result in hidden for row in result.rows()]
    parts = {t.name: t.parts_ms() for t in throughputs if t.outcomes}
    kept = publish(
        "kvtransfer", rows, arguments.json, folder=arguments.results, rounds=arguments.rounds, parts=parts
    )
    plot = kv_plot.draw(throughputs, peers, hidden, kept.with_suffix(".svg"))
    print(f"kept as {kept} and {plot}")


async def _throughputs(
    arguments: argparse.Namespace,
) -> tuple[list[kv_throughput.Throughput], kv_throughput.BarePeers]:
    peers = kv_throughput.BarePeers()
    groups = kv_throughput.groups()
    if arguments.quick:
        groups = kv_throughput.groups((64,), (64, 2048))[:1]
    found = []
    if not arguments.only or arguments.only == "throughput":
        for group in groups:
            print(f"measuring transfers, {group.name}", flush=True)
            found += await kv_throughput.measure(group, peers, arguments.rounds)
    await peers.close()
    return found, peers


async def _hidden(arguments: argparse.Namespace) -> list[kv_hidden.Hidden]:
    if arguments.only and arguments.only != "hidden":
        return []
    cases = kv_hidden.QUICK_CASES if arguments.quick else kv_hidden.CASES
    return await kv_hidden.measure(cases, arguments.rounds)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one block size and few lengths, two rounds")
    parser.add_argument("--only", choices=("throughput", "hidden"), help="leave the other half out")
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds of each measurement; default 5, quick 2"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for the dated copy and the plot"
    )
    parser.add_argument("--json", help="write the rows here")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
