"""Two of each role as real processes, with a proxy in front of every one.

Owns the processes, which come back when they die, and the proxies, through which all questions, all
sessions and all KV go: a worker announces its proxy. Who connects to a worker's proxy is known by the
owner of the socket; a router's proxy is for clients.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil

from baton.cluster.free_ports import LOOPBACK, claim
from baton.cluster.guard import Guard
from baton.cluster.role_process import RoleProcess, RoleSpec
from baton.cluster.status import fetch_status
from baton.cluster.supervisor import Supervisor
from baton.errors import BatonError, ConfigError
from baton.redis_server import EmbeddedRedis
from baton.v1.admin_service_pb2 import WorkerStatus
from tests.integration.ledgers import Ledgers, ledger
from tests.tcp_proxy import TcpProxy

ROUTERS = ("router-0", "router-1")
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
WORKERS = (*PREFILL, *DECODE)
# The peer of a router's proxy.
CLIENT = "client"
READY_WITHIN_S = 60.0
# Where no system takes the ports of outgoing connections from.
BELOW_EPHEMERAL = range(20_000, 32_000)
_POLL_S = 0.02


class ProcessCluster:
    """The running processes, by name; made by `async with process_cluster(...)`."""

    def __init__(self, supervisor: Supervisor, ports: dict[str, int], proxies: dict[str, TcpProxy]) -> None:
        self.supervisor = supervisor
        self.proxies = proxies
        self._ports = ports
        self._stopped: set[str] = set()

    @property
    def addresses(self) -> list[str]:
        """Where clients connect, one address per router."""
        return [self.proxies[name].address for name in ROUTERS]

    @property
    def routers_awake(self) -> list[str]:
        """The routers that are not stopped: only they can be asked."""
        return [name for name in ROUTERS if name not in self._stopped]

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stops a process with SIGSTOP and lets it go on in the end."""
        pid = self.supervisor.pids[name]
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(name)
        try:
            yield
        finally:
            self._stopped.discard(name)
            os.kill(pid, signal.SIGCONT)

    async def kill(self, name: str) -> None:
        """Kills a process and returns once its end is known here; it is started again."""
        pid = self.supervisor.pids[name]
        os.kill(pid, signal.SIGKILL)
        while self.supervisor.pids.get(name) == pid:
            await asyncio.sleep(0.001)

    async def workers(self, router: str) -> dict[str, WorkerStatus]:
        """The workers that a router can use now; none while it does not answer."""
        with suppress(BatonError):
            status = await fetch_status(self._admin(router), timeout_s=1.0)
            return {worker.name: worker for worker in status.workers if worker.state == "ready"}
        return {}

    async def num_requests(self, router: str) -> int:
        """Requests that a router has; none while it does not answer."""
        with suppress(BatonError):
            return (await fetch_status(self._admin(router), timeout_s=1.0)).num_requests
        return 0

    async def num_attempts(self, router: str, worker: str) -> int:
        """Attempts of one router at one worker."""
        workers = await self.workers(router)
        return workers[worker].num_attempts if worker in workers else 0

    async def num_ready(self, router: str, names: Sequence[str]) -> int:
        """How many of these workers' living processes a router can use."""
        pids = self.supervisor.pids
        workers = await self.workers(router)
        return sum(name in workers and workers[name].pid == pids.get(name) for name in names)

    async def wait_ready(self, names: Sequence[str], within_s: float) -> None:
        """Waits until each router that is not stopped can use each of these workers."""
        async with asyncio.timeout(within_s):
            for router in ROUTERS:
                while router in self.routers_awake and await self.num_ready(router, names) < len(names):
                    await asyncio.sleep(_POLL_S)

    async def wait_able(self, within_s: float) -> None:
        """Waits until each router can use at least one worker of each role."""
        async with asyncio.timeout(within_s):
            for router in ROUTERS:
                while not all([await self.num_ready(router, role) for role in (PREFILL, DECODE)]):
                    await asyncio.sleep(_POLL_S)

    async def ledgers(self) -> Ledgers:
        """What every process holds, asked directly and not through a proxy."""
        ports = {name: self._ports[name] for name in WORKERS}
        addresses = [self._admin(name) for name in ROUTERS] + [f"{LOOPBACK}:{p}" for p in ports.values()]
        return dict([await ledger(address) for address in addresses])

    def _admin(self, router: str) -> str:
        return f"{LOOPBACK}:{self._ports[f'{router} admin']}"


@asynccontextmanager
async def process_cluster(model: Path, logs: Path, placement: str) -> AsyncIterator[ProcessCluster]:
    """Starts everything and yields once each router has all workers.

    placement: the routers' setting.
    """
    names = (*ROUTERS, *(f"{router} admin" for router in ROUTERS), *WORKERS)
    ports = dict(zip(names, _fixed_ports(len(names)), strict=True))
    async with AsyncExitStack() as stack:
        guard = await stack.enter_async_context(Guard())
        redis = await stack.enter_async_context(EmbeddedRedis())
        supervisor: list[Supervisor] = []
        proxies = {
            name: await stack.enter_async_context(TcpProxy(ports[name], _owner_finder(supervisor)))
            for name in WORKERS
        }
        proxies |= {
            name: await stack.enter_async_context(TcpProxy(ports[name], lambda _port: CLIENT))
            for name in ROUTERS
        }
        specs = [_router(name, model, ports, redis.url, placement) for name in ROUTERS]
        specs += [_worker(name, model, ports[name], proxies[name].address, redis.url) for name in WORKERS]
        processes = [RoleProcess(spec, logs / f"{spec.name}.log", guard) for spec in specs]
        supervisor.append(Supervisor(processes, report=print, rng=random.Random(1)))
        cluster = ProcessCluster(supervisor[0], ports, proxies)
        running = asyncio.create_task(cluster.supervisor.run(), name="supervisor")
        try:
            await _until_ready(cluster, running)
            cluster.supervisor.is_settled = True
            yield cluster
        finally:
            running.cancel()
            await asyncio.wait([running])
            await cluster.supervisor.stop([ROUTERS, WORKERS], 10.0)


async def _until_ready(cluster: ProcessCluster, running: asyncio.Task[None]) -> None:
    """Waits until each router has all workers; raises what ends the supervisor before."""
    ready = asyncio.create_task(cluster.wait_ready(WORKERS, READY_WITHIN_S))
    await asyncio.wait([ready, running], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        ready.cancel()
        running.result()
    await ready


def _fixed_ports(num_ports: int) -> list[int]:
    """Free ports that no proxy and no connection is given while a process is yet to start or dead."""
    candidates = list(BELOW_EPHEMERAL)
    random.shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        with suppress(ConfigError):
            ports.append(claim(port, "port"))
        if len(ports) == num_ports:
            break
    return ports


def _owner_finder(supervisor: list[Supervisor]) -> Callable[[int], str]:
    """Finds the name of the process whose socket has a port; "" if it is gone already."""

    def owner(port: int) -> str:
        for name, pid in supervisor[0].pids.items():
            with suppress(psutil.Error):
                if any(c.laddr.port == port for c in psutil.Process(pid).net_connections("tcp") if c.raddr):
                    return name
        return ""

    return owner


def _router(name: str, model: Path, ports: dict[str, int], redis_url: str, placement: str) -> RoleSpec:
    command = ("-m", "router", f"--name={name}", f"--model={model}", f"--port={ports[name]}")
    admin_port = ports[f"{name} admin"]
    settings = (f"--admin-port={admin_port}", f"--placement={placement}", "--drain-s=1")
    return RoleSpec(
        name=name,
        role="router",
        command=(*command, *settings),
        environment={"BATON_ROUTER_REDIS_URL": redis_url},
    )


def _worker(name: str, model: Path, port: int, advertise: str, redis_url: str) -> RoleSpec:
    role = name.partition("-")[0]
    command = ("-m", f"{role}_worker", f"--name={name}", f"--model={model}", f"--port={port}")
    settings = (f"--advertise={advertise}", "--dtype=float32", "--threads=1", f"--kv-cache-bytes={16 << 20}")
    return RoleSpec(
        name=name,
        role=role,
        command=(*command, *settings, "--drain-s=1"),
        environment={f"BATON_{role.upper()}_REDIS_URL": redis_url},
    )
