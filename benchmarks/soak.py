"""A cluster at full load for a long time: `python -m benchmarks.soak --minutes 20`.

A tenth of the questions are cancelled. Memory, descriptors and threads of every process are sampled, and what
it holds for requests is compared before and after. Exits with 1 if a process's memory grows by 1 MiB
a minute or more over the last half, if it has more descriptors when all is quiet again, if it has died, if a
ledger is not zero before or after, or if a question failed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.errors import BatonError
from benchmarks.chaos.load import Load, Mix
from benchmarks.chaos.plan import TINY_CACHE_BYTES, tiny_cases
from benchmarks.ledgers import Ledgers, ledger, settled
from benchmarks.process_watch import ProcessWatch, Sample, changes, slope_per_min
from benchmarks.report import RESULTS, Row, publish
from benchmarks.tiny_llama import write_tiny_model

EVERY_S = 5.0
MAX_SLOPE_MIB_PER_MIN = 1.0
# Sockets of whoever asks while somebody looks.
FDS_SLACK = 4
SETTLED_WITHIN_S = 10.0
WARM_UP_S = 10.0
QUIET_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One process over the run; slope: of the last half, by least squares.

    fds, threads: when all was quiet, after some answers and in the end; busy_fds: the most under load.
    """

    name: str
    slope_mib_per_min: float
    first_rss_mib: float
    last_rss_mib: float
    first_fds: int
    last_fds: int
    busy_fds: int
    first_threads: int
    last_threads: int

    @classmethod
    def of(cls, name: str, quiet: Sequence[Sample], samples: Sequence[Sample]) -> Growth:
        """From samples when all was quiet, and from samples under load, two or more in the last half."""
        first, last = quiet[0], quiet[-1]
        half = (samples[0].at + samples[-1].at) / 2
        return cls(
            name=name,
            slope_mib_per_min=slope_per_min([sample for sample in samples if sample.at >= half]),
            first_rss_mib=samples[0].rss_mib,
            last_rss_mib=samples[-1].rss_mib,
            first_fds=first.num_fds,
            last_fds=last.num_fds,
            busy_fds=max(sample.num_fds for sample in samples),
            first_threads=first.num_threads,
            last_threads=last.num_threads,
        )

    @property
    def complaints(self) -> list[str]:
        """What has grown that must not."""
        found = []
        if self.slope_mib_per_min >= MAX_SLOPE_MIB_PER_MIN:
            found.append(f"{self.name} grows by {self.slope_mib_per_min:.2f} MiB/min")
        if self.last_fds > self.first_fds + FDS_SLACK:
            found.append(f"{self.name} had {self.first_fds} descriptors, and has {self.last_fds}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What a run found.

    growths: of the processes that lived from the first look to the last.
    deaths: in words, which did not.
    """

    growths: list[Growth]
    deaths: list[str]
    before: Ledgers
    after: Ledgers
    load: Load

    @property
    def complaints(self) -> list[str]:
        """Why it was not passed; empty if it was."""
        failures = [record.failure for record in self.load.records if record.outcome == "failed"]
        found = [f"{len(failures)} questions failed, the first with {failures[0]}"] if failures else []
        found += [complaint for growth in self.growths for complaint in growth.complaints]
        found += self.deaths
        if not _is_zero(self.before):
            found.append(f"ledgers were not zero before the load: {self.before}")
        if self.after != self.before:
            found.append(f"ledgers were {self.before} and are {self.after}")
        return found


async def soak(config: ClusterConfig, mix: Mix, minutes: float, seed: int) -> Soak:
    """Loads a cluster of its own for so long."""
    async with await LocalCluster.start(config, report=print) as cluster:
        routers = {address: f"router-{index}" for index, address in enumerate(cluster.addresses)}
        quiet = ProcessWatch(lambda: _pids(cluster), EVERY_S)
        # What is made on first use is made by then.
        await _load(Load(routers, mix, seed + 1), ProcessWatch(quiet.find, EVERY_S), WARM_UP_S)
        before = await settled(lambda: _ledgers(cluster), _is_zero, SETTLED_WITHIN_S)
        await _look(quiet)
        load = Load(routers, mix, seed)
        watch = ProcessWatch(quiet.find, EVERY_S)
        await _load(load, watch, 60 * minutes)
        after = await settled(lambda: _ledgers(cluster), lambda found: found == before, SETTLED_WITHIN_S)
        await _look(quiet)
    deaths = changes([quiet, watch])
    lived = sorted({*quiet.samples, *watch.samples} - deaths.keys())
    growths = [Growth.of(name, quiet.samples[name], watch.samples[name]) for name in lived]
    return Soak(growths=growths, deaths=[*deaths.values()], before=before, after=after, load=load)


async def _pids(cluster: LocalCluster) -> dict[str, int]:
    """Of all processes by name; those of actors are asked for anew each time.

    Actors are left out of a look at which their pool does not answer; at the last one that is a complaint.
    """
    with suppress(BatonError):
        workers = (await cluster.workers()).workers
        return {worker.name: worker.pid for worker in workers if worker.pid} | cluster.pids
    return cluster.pids


def _is_zero(ledgers: Ledgers) -> bool:
    return not any(count for counts in ledgers.values() for count in counts.values())


async def _load(load: Load, watch: ProcessWatch, seconds: float) -> None:
    """Loads for so long, and watches meanwhile."""
    running = asyncio.create_task(load.run(), name="load")
    async with watch:
        await asyncio.wait([running], timeout=seconds)
    load.is_stopped = True
    await running


async def _look(quiet: ProcessWatch) -> None:
    """Looks once the connections of the last clients are closed."""
    # grpc.aio closes the connection of a cancelled call only when the channel is collected.
    gc.collect()
    await asyncio.sleep(QUIET_S)
    await quiet.look()


async def _ledgers(cluster: LocalCluster) -> Ledgers:
    addresses = [*cluster.admin_addresses, *(worker.address for worker in (await cluster.status()).workers)]
    return dict([await ledger(address) for address in addresses])


def report_rows(found: Soak, minutes: float) -> list[Row]:
    """One slope per process, and how much was done."""
    rows = [
        Row(metric=f"{growth.name} memory slope", unit="MiB/min", ours=growth.slope_mib_per_min, runs=1)
        for growth in found.growths
    ]
    counts: Mapping[str, int] = _outcomes(found.load)
    per_s = counts.get("answered", 0) / (60 * minutes)
    return [*rows, Row(metric="answers", unit="1/s", ours=per_s, runs=sum(counts.values()))]


def _outcomes(load: Load) -> dict[str, int]:
    kinds = sorted({record.outcome for record in load.records})
    return {kind: sum(record.outcome == kind for record in load.records) for kind in kinds}


def _config(arguments: argparse.Namespace, model: Path, logs: Path) -> ClusterConfig:
    return ClusterConfig(
        model=str(model),
        decode=arguments.decode,
        routers=arguments.routers,
        ray=arguments.ray,
        log_dir=str(logs),
        dtype="float32",
        threads=1,
        kv_cache_bytes=TINY_CACHE_BYTES,
        port=0,
        admin_port=0,
        dashboard_port=0,
        control_port=0,
        http_port=0,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0, help="of load")
    parser.add_argument("--seed", type=int, default=1, help="of the questions")
    parser.add_argument("--clients", type=int, default=16, help="that ask one question after the other")
    parser.add_argument("--routers", type=int, default=1, help="routers")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=False, help="decode on Ray")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the dated result")
    return parser.parse_args()


def main() -> int:
    """Entry point; returns the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    mix = Mix(cases=tiny_cases(), token_ids=range(3, 259), num_clients=arguments.clients, too_soon_share=0.0)
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as scratch:
        model = Path(scratch) / "tiny"
        write_tiny_model(model)
        config = _config(arguments, model, Path(scratch) / "logs")
        found = asyncio.run(soak(config, mix, arguments.minutes, arguments.seed))
    kept = publish(
        "soak",
        report_rows(found, arguments.minutes),
        None,
        folder=arguments.out,
        minutes=arguments.minutes,
        clients=arguments.clients,
        ray=arguments.ray,
        questions=_outcomes(found.load),
        processes=[asdict(growth) for growth in found.growths],
        complaints=found.complaints,
    )
    print(f"questions: {_outcomes(found.load)}; kept as {kept}")
    for complaint in found.complaints:
        print(f"NOT PASSED: {complaint}")
    return 1 if found.complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
