"""What a router costs and adds, beside the bare control: rounds of small loads, and their figures.

Owns the loads and the arithmetic. A router of one worker of each role is measured in every round together
with the larger one, so that what the machine does meanwhile happens to both.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from statistics import median

from baton.bench.percentiles import percentile
from benchmarks.report import Row
from benchmarks.router_load import LoadProcess, LoadResult, LoadSpec
from benchmarks.router_rig import Cluster, spending
from benchmarks.sim_costs import SimCosts

# A step takes long enough that a router keeps up on a slow machine: every token is then a message of its own.
COSTS = SimCosts(decode_step_ms=10.0)
OUTPUT_TOKENS = 129
STREAMS = 32
BUSY = 8
IDLE_S = 2.0

# From shared goals: see benchmarks/README.md.
BUDGET = "the budget"
LATENCY_MS, REQUEST_US = 2.0, 1_500.0
# 80 us a token where a bare stream costs 45.
TOKEN_TARGET = 0.56
# A quarter more is within what such a machine differs from itself.
FLAT_TARGET = 0.8


@dataclass(slots=True)
class Side:
    """A process under measurement: a router or the control. Lists have a value per round.

    request_us, token_us: processor time per request of one token, and per further token, idle time taken off.
    idle_us: processor time in a second without requests.
    one_ms, busy_ms: time to the first token, one request at a time and BUSY at a time, less prefill.
    """

    name: str
    num_workers: int
    pid: int
    address: str
    idle_us: float = 0.0
    request_us: list[float] = field(default_factory=list)
    token_us: list[float] = field(default_factory=list)
    one_ms: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_chunks: int = 0

    async def rest(self) -> None:
        """Measures the idle process."""
        with spending(self.pid) as spent:
            await asyncio.sleep(IDLE_S)
        self.idle_us = 1e6 * spent.cpu_s / spent.wall_s

    def forget(self) -> None:
        """What was measured so far was to warm up."""
        for values in (self.request_us, self.token_us, self.one_ms, self.busy_ms):
            values.clear()
        self.num_tokens = self.num_chunks = 0

    def round(self, load: LoadProcess, sizes: RoundSizes, seed: int) -> None:
        """One round of loads."""

        def spec(num_requests: int, concurrency: int, max_tokens: int = 1) -> LoadSpec:
            return LoadSpec(
                address=self.address,
                num_requests=num_requests,
                concurrency=concurrency,
                max_tokens=max_tokens,
                limit_s=sizes.limit_s,
                seed=seed,
            )

        self.one_ms += load.run(spec(sizes.num_one, 1)).added_ms
        self.busy_ms += load.run(spec(sizes.num_busy, BUSY)).added_ms
        short, short_us = self._cost(load, spec(sizes.num_short, STREAMS))
        long, long_us = self._cost(load, spec(sizes.num_long, STREAMS, OUTPUT_TOKENS))
        self.request_us.append(short_us)
        self.token_us.append((long_us - short_us) / (OUTPUT_TOKENS - 1))
        for result in (short, long):
            self.num_tokens += result.num_tokens
            self.num_chunks += result.num_chunks

    def _cost(self, load: LoadProcess, spec: LoadSpec) -> tuple[LoadResult, float]:
        """A load, and processor time per request, in microseconds."""
        with spending(self.pid) as spent:
            result = load.run(spec)
        return result, (1e6 * spent.cpu_s - self.idle_us * spent.wall_s) / result.num_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSizes:
    """How many requests each load of a round has; none starts later than limit_s after the load's first."""

    num_one: int = 60
    num_busy: int = 120
    num_short: int = 256
    num_long: int = 32
    limit_s: float = 6.0


@dataclass(slots=True)
class Scale:
    """One number of workers: the router and the control, and the router of 1 worker in the same rounds."""

    router: Side
    control: Side
    flatness: list[float] = field(default_factory=list)
    base_us: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, cluster: Cluster) -> Scale:
        """The two of a cluster."""
        assert cluster.relay is not None
        num_workers = cluster.num_workers
        router = Side("router", num_workers, cluster.pid, cluster.address)
        control = Side("bare relay", num_workers, cluster.relay.pid, cluster.relay.address)
        return cls(router, control)

    async def rest(self) -> None:
        """Measures both while idle."""
        await asyncio.gather(self.router.rest(), self.control.rest())

    def round(self, load: LoadProcess, sizes: RoundSizes, seed: int) -> None:
        """One round of both."""
        self.router.round(load, sizes, seed)
        self.control.round(load, sizes, seed)

    def compared(self, base: Scale) -> None:
        """Notes how the last round compares with the base's, which was measured right before."""
        base_us = base.router.request_us[-1]
        self.base_us.append(base_us)
        self.flatness.append(base_us / self.router.request_us[-1])

    def rows(self) -> list[Row]:
        """The figures."""
        return [*self._latency_rows(), *self._cost_rows(), self._chunk_row()]

    def _latency_rows(self) -> list[Row]:
        router, control = self.router, self.control
        within = _latency("added latency p50 x1", router, router.one_ms, 50)
        assert within.ours is not None
        return [
            replace(within, peer=LATENCY_MS, peer_name=BUDGET, ratio=LATENCY_MS / within.ours, target=1.0),
            _latency("added latency p99 x1", router, router.one_ms, 99),
            _latency(f"added latency p50 x{BUSY}", router, router.busy_ms, 50),
            _latency(f"added latency p99 x{BUSY}", router, router.busy_ms, 99),
            _latency("bare relay, ttft p50 x1", control, control.one_ms, 50),
            _latency(f"bare relay, ttft p50 x{BUSY}", control, control.busy_ms, 50),
        ]

    def _cost_rows(self) -> list[Row]:
        router, control, size = self.router, self.control, _size(self.router.num_workers)
        rows = [
            _against(f"CPU per request, {size}", router.request_us, REQUEST_US, BUDGET, 1.0),
            _plain(f"bare relay, CPU per request, {size}", control.request_us),
            _against(
                f"CPU per token, {size}",
                router.token_us,
                median(control.token_us),
                "bare relay",
                TOKEN_TARGET,
            ),
            Row(
                metric=f"idle CPU per worker, {size}",
                unit="us/s",
                ours=router.idle_us / max(2, router.num_workers),
                runs=1,
            ),
        ]
        if self.flatness:
            base_us = median(self.base_us)
            flat = _against(f"flatness, {size}", router.request_us, base_us, "1 worker", FLAT_TARGET)
            rows.append(replace(flat, ratio=median(self.flatness)))
        return rows

    def _chunk_row(self) -> Row:
        router = self.router
        return Row(
            metric=f"messages per token, {_size(router.num_workers)}",
            unit="",
            ours=router.num_chunks / router.num_tokens,
            runs=len(router.request_us),
        )


def _size(num_workers: int) -> str:
    return "1 worker" if num_workers == 1 else f"{num_workers} workers"


def _latency(name: str, side: Side, values_ms: list[float], percent: int) -> Row:
    return Row(
        metric=f"{name}, {_size(side.num_workers)}",
        unit="ms",
        ours=percentile(values_ms, percent),
        runs=len(values_ms),
    )


def _against(metric: str, us: list[float], peer: float, peer_name: str, target: float) -> Row:
    ours = median(us)
    return Row(
        metric=metric,
        unit="us",
        ours=ours,
        runs=len(us),
        peer=peer,
        peer_name=peer_name,
        ratio=peer / ours,
        target=target,
    )


def _plain(metric: str, us: list[float]) -> Row:
    return Row(metric=metric, unit="us", ours=median(us), runs=len(us))
