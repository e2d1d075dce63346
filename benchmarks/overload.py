"""More than a cluster bears: `python -m benchmarks.overload [--seconds 30] [--rounds 3]`.

Open-loop load whose requests name their objective. First the rate is looked for at which most requests meet
theirs, then windows at this rate and at three times as much take turns: goodput, the requests per second that
met both objectives, should stay at nine tenths. Then a storm: 200 long requests at once, all cancelled after
half a second, and the time until the next answer. The client runs on the same machine and takes its share.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from baton import AsyncClient, Retry
from baton.bench.open_loop import offer
from baton.bench.outcome import Planned
from baton.bench.target import Bounds
from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.errors import Cancelled, InternalError
from baton.generation import Generation
from benchmarks.attainment import Objectives, Window
from benchmarks.chaos.plan import REAL_MODEL, TINY_CACHE_BYTES
from benchmarks.report import RESULTS, Row, publish
from benchmarks.tiny_llama import write_tiny_model
from benchmarks.workload import MIXES, Workload

OVERLOAD = 3.0
MIN_SHARE = 0.9
# Rates are probed from here, each so many times the one before, until two in a row were no better.
FIRST_RATE = {"tiny": 4.0, REAL_MODEL: 0.5}
STEP = 1.4
# The last one is some 400 times the first.
MAX_PROBES = 18
BOUNDS = Bounds(max_in_flight=512)
STORM_REQUESTS = 200
STORM_TOKENS = 1500
STORM_CANCELLED_AFTER_S = 0.5
STORM_ANSWERED_WITHIN_S = 2.0


class ObjectiveTarget:
    """A cluster's router; each request says within which time it wants its first token."""

    def __init__(self, client: AsyncClient, objectives: Objectives) -> None:
        self._client = client
        self._objectives = objectives

    async def answer(self, request: Planned, timeout_s: float) -> AsyncGenerator[int, None]:
        """One greedy answer that no stop token ends."""
        allowed_s = self._objectives.allowed_ttft_s(len(request.token_ids))
        generation = self._client.generate(
            token_ids=request.token_ids,
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=timeout_s,
            ttft_objective_ms=round(1000 * allowed_s),
        )
        async with generation:
            async for chunk in generation:
                if chunk.token_ids:
                    yield len(chunk.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """Offers windows to one cluster. seconds: of each. first_rate: the lowest that is probed."""

    target: ObjectiveTarget
    workload: Workload
    objectives: Objectives
    seconds: float
    first_rate: float

    async def goodput(self, rate: float, seed: int) -> float:
        """Requests per second that met their objectives, at this rate of arrivals."""
        plan = self.workload.window(rate, self.seconds, seed)
        outcomes = await offer(self.target, plan, BOUNDS)
        window = Window(
            side="baton", rate=rate, round_number=seed, outcomes=tuple(outcomes), objectives=self.objectives
        )
        found = window.num_met / self.seconds
        print(f"{rate:6.1f} req/s: {found:6.2f} req/s met their objectives", flush=True)
        return found

    async def peak(self) -> float:
        """The lowest probed rate with the best goodput.

        Raises InternalError if no request met its objectives, or goodput never stopped growing.
        """
        found: list[tuple[float, float]] = []
        best = 0
        while best >= len(found) - 2:
            if len(found) == MAX_PROBES:
                raise InternalError(f"goodput still grows at {found[-1][0]:.1f} requests per second")
            rate = self.first_rate * STEP ** len(found)
            found.append((rate, await self.goodput(rate, seed=len(found))))
            best = max(range(len(found)), key=lambda index: found[index][1])
        if not found[best][1]:
            raise InternalError(f"no request met its objectives from {self.first_rate} per second on")
        return found[best][0]


async def cancel_storm(client: AsyncClient) -> float:
    """Seconds from the cancels until a short request that follows them is answered.

    Raises whatever ended one of the storm's requests before it was cancelled.
    """
    loop = asyncio.get_running_loop()
    storm = [
        client.generate(
            token_ids=[100 + index % 100, 100 + index // 100, *range(3, 200)],
            max_tokens=STORM_TOKENS,
            ignore_eos=True,
        )
        for index in range(STORM_REQUESTS)
    ]
    readers = [asyncio.create_task(_hear(generation)) for generation in storm]
    await asyncio.sleep(STORM_CANCELLED_AFTER_S)
    for generation in storm:
        generation.cancel()
    cancelled_at = loop.time()
    await client.generate(token_ids=[5, 6, 7], max_tokens=8, ignore_eos=True).text()
    answered_s = loop.time() - cancelled_at
    await asyncio.gather(*readers)
    return answered_s


async def _hear(generation: Generation) -> None:
    """Hears it until it is cancelled. Raises InternalError if it is answered in full before."""
    with suppress(Cancelled):
        async for _ in generation:
            pass
        raise InternalError("a request of the storm was answered before it was cancelled")


async def run(scratch: Path, arguments: argparse.Namespace) -> list[Row]:
    """Measures on a cluster of its own."""
    is_tiny = arguments.model == "tiny"
    if is_tiny:
        write_tiny_model(scratch / "tiny", max_model_len=4096)
    config = ClusterConfig(
        model=str(scratch / "tiny") if is_tiny else arguments.model,
        ray=False,
        dtype="float32" if is_tiny else None,
        threads=1,
        kv_cache_bytes=TINY_CACHE_BYTES if is_tiny else None,
        log_dir=str(scratch / "logs"),
        port=0,
        admin_port=0,
        dashboard_port=0,
        control_port=0,
        http_port=0,
    )
    objectives = Objectives()
    async with (
        await LocalCluster.start(config, report=print) as cluster,
        await AsyncClient.connect(cluster.address, retry=Retry(max_attempts=1)) as client,
    ):
        vocab_size = 259 if is_tiny else 1000
        overload = Overload(
            target=ObjectiveTarget(client, objectives),
            workload=Workload(mix=MIXES["80/15/5"], vocab_size=vocab_size),
            objectives=objectives,
            seconds=arguments.seconds,
            first_rate=FIRST_RATE.get(arguments.model, FIRST_RATE[REAL_MODEL]),
        )
        # What is learned and made on first use is there by then.
        await overload.goodput(overload.first_rate, seed=99)
        rate = await overload.peak()
        pairs = [
            (await overload.goodput(rate, seed), await overload.goodput(OVERLOAD * rate, seed))
            for seed in range(100, 100 + arguments.rounds)
        ]
        storms = [await cancel_storm(client) for _ in range(arguments.rounds)]
    return _rows(rate, pairs, storms)


def _rows(rate: float, pairs: list[tuple[float, float]], storms: list[float]) -> list[Row]:
    at_peak, at_three = (median(values) for values in zip(*pairs, strict=True))
    return [
        Row(metric="rate of the peak", unit="1/s", ours=rate, runs=1),
        Row(metric="goodput at the peak", unit="1/s", ours=at_peak, runs=len(pairs)),
        Row(
            metric=f"goodput at {OVERLOAD:g} times its rate",
            unit="1/s",
            ours=at_three,
            runs=len(pairs),
            peer=at_peak,
            peer_name="the peak",
            ratio=at_three / at_peak if at_peak else None,
            target=MIN_SHARE,
        ),
        Row(
            metric=f"next answer after {STORM_REQUESTS} cancels",
            unit="s",
            ours=max(storms),
            runs=len(storms),
            peer=STORM_ANSWERED_WITHIN_S,
            peer_name="what is wanted",
            ratio=STORM_ANSWERED_WITHIN_S / max(storms),
            target=1.0,
        ),
    ]


def main() -> int:
    """Entry point; exits with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of windows, and storms")
    parser.add_argument("--model", default=REAL_MODEL, help="a pulled model, or tiny: then all is overhead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the dated result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="baton-overload-") as scratch:
        rows = asyncio.run(run(Path(scratch), arguments))
    kept = publish(
        "overload", rows, None, folder=arguments.out, seconds=arguments.seconds, model=arguments.model
    )
    print(f"kept as {kept}")
    return int(any(row.target is not None and (row.ratio or 0) < row.target for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
