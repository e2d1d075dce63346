"""A real router process, simulated workers for it, and the processor time that it takes.

Owns the processes of one benchmark from start to end. What is sent through them is benchmarks/router.py's
business.
"""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.cluster.guard import Guard
from baton.cluster.role_process import RoleProcess, RoleSpec
from baton.cluster.status import fetch_status
from baton.models import ModelDir
from baton.redis_server import EmbeddedRedis
from baton.v1.admin_service_pb2 import GetClusterStatusResponse
from benchmarks.bare_relay import RelayProcess
from benchmarks.sim_costs import SimCosts, SimSizes
from benchmarks.sim_workers import FleetSpec, SimProcess
from benchmarks.tiny_model import make_model

START_S = 30.0
READY_S = 90.0
_POLL_S = 0.3


class NotReady(Exception):
    """The router has not got all its workers in time."""


@dataclass(slots=True)
class Cluster:
    """A router with its simulated workers, and the bare control on the same decode workers.

    namespace: its name in Redis and in the process of the simulated workers.
    num_workers: half of them prefill, at least one.
    """

    namespace: str
    num_workers: int
    process: RoleProcess
    address: str
    admin_address: str
    relay: RelayProcess | None = None

    @property
    def pid(self) -> int:
        """Process id of the router."""
        return self.process.pid


@dataclass(slots=True, kw_only=True)
class Rig:
    """Redis, a model, the process of all simulated workers: what clusters are made of.

    async with Rig.open(folder) as rig:
        async with rig.cluster(64) as cluster:
            ...
    """

    redis_url: str = field(repr=False)
    model: ModelDir
    sims: SimProcess
    guard: Guard
    folder: Path
    num_clusters: int = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path) -> AsyncIterator[Rig]:
        """Starts what all clusters share. folder: for the model, logs and ready files; must exist."""
        async with AsyncExitStack() as stack:
            guard = await stack.enter_async_context(Guard())
            redis = await stack.enter_async_context(EmbeddedRedis())
            sims = stack.enter_context(SimProcess())
            model = make_model(folder / "simulated")
            yield cls(redis_url=redis.url, model=model, sims=sims, guard=guard, folder=folder)

    @asynccontextmanager
    async def cluster(
        self,
        num_workers: int,
        *,
        costs: SimCosts = SimCosts(),  # noqa: B008 - frozen
        sizes: SimSizes = SimSizes(),  # noqa: B008 - frozen
        settings: Mapping[str, str] | None = None,
        num_relayed: int = 0,
        ready_s: float = READY_S,
    ) -> AsyncIterator[Cluster]:
        """A router that has all its workers, until the block is left.

        num_workers: half of them prefill; 1 is one of each.
        settings: of the router, by the names of its options without dashes.
        num_relayed: decode workers that a bare control relays, at most; 0 for none.
        Raises NotReady if the router has not got its workers within ready_s seconds.
        """
        self.num_clusters += 1
        namespace, half = f"sim-{self.num_clusters}", max(1, num_workers // 2)
        fingerprint = self.model.fingerprint().SerializeToString()
        spec = FleetSpec(
            redis_url=self.redis_url,
            namespace=namespace,
            fingerprint=fingerprint,
            num_prefill=half,
            num_decode=half,
            costs=costs,
            sizes=sizes,
        )
        async with AsyncExitStack() as stack:
            infos = self.sims.start(spec)
            stack.callback(self.sims.stop, namespace)
            process = self._router(namespace, settings or {})
            stack.push_async_callback(process.stop, 10.0)
            cluster = await self._started(namespace, num_workers, process)
            await _wait_ready(cluster, half, ready_s)
            if num_relayed:
                decodes = [info for info in infos.values() if info.role == "decode"][:num_relayed]
                cluster.relay = RelayProcess(decodes, fingerprint)
                stack.callback(cluster.relay.close)
            yield cluster

    def _router(self, namespace: str, settings: Mapping[str, str]) -> RoleProcess:
        ready_file = self.folder / f"{namespace}.ready"
        options = {
            "name": namespace,
            "model": str(self.model.path),
            "namespace": namespace,
            "port": "0",
            "http_port": "0",
            "admin_port": "0",
            "drain_s": "1",
            "log_level": "warning",
            "ready_file": str(ready_file),
            **settings,
        }
        command = ("-m", "router", *(f"--{name.replace('_', '-')}={text}" for name, text in options.items()))
        spec = RoleSpec(
            name=namespace,
            role="router",
            command=command,
            environment={"BATON_ROUTER_REDIS_URL": self.redis_url},
        )
        return RoleProcess(spec, self.folder / f"{namespace}.log", self.guard)

    async def _started(self, namespace: str, num_workers: int, process: RoleProcess) -> Cluster:
        ready_file = self.folder / f"{namespace}.ready"
        await process.start()
        async with asyncio.timeout(START_S):
            while not ready_file.exists():
                if not process.is_running:
                    raise NotReady(f"the router ended:\n{process.last_lines()}")
                await asyncio.sleep(0.05)
        facts = json.loads(ready_file.read_text(encoding="utf-8"))
        return Cluster(
            namespace=namespace,
            num_workers=num_workers,
            process=process,
            address=facts["address"],
            admin_address=facts["admin_address"],
        )


async def _wait_ready(cluster: Cluster, half: int, within_s: float) -> None:
    """Until the router knows that every prefill worker reaches every decode worker."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                status = await fetch_status(cluster.admin_address, timeout_s=within_s)
                if _num_paired(status) == half * half:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        message = f"{cluster.num_workers} workers were not ready within {within_s:g} s"
        raise NotReady(message) from None


def _num_paired(status: GetClusterStatusResponse) -> int:
    return sum(pair.transport != "" for worker in status.workers for pair in worker.pairs)


@dataclass(slots=True)
class Spent:
    """Seconds of processor time, of all threads of a process, and of the clock on the wall."""

    cpu_s: float = 0.0
    wall_s: float = 0.0


@contextmanager
def spending(pid: int) -> Iterator[Spent]:
    """What a process spends while the block runs."""
    spent, cpu_s, wall_s = Spent(), cpu_time_s(pid), time.perf_counter()
    try:
        yield spent
    finally:
        spent.cpu_s, spent.wall_s = cpu_time_s(pid) - cpu_s, time.perf_counter() - wall_s


def cpu_time_s(pid: int) -> float:
    """Processor time that a process has taken so far, in seconds."""
    if platform.system() == "Linux":
        # The number of a process's clock, as clock_getcpuclockid(3) makes it; /proc counts in 10 ms.
        return time.clock_gettime((~pid << 3) | 2)
    import psutil  # noqa: PLC0415 - elsewhere only

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
