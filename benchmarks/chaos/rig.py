"""The cluster of a chaos run: two of each role as `baton up` starts them, a proxy in front of every one.

Owns the cluster, its Redis and the proxies, through which all questions, all sessions and all KV go. It says
who is busy and who is whole, and sends signals; which fault strikes whom is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from baton.cluster.config import ClusterConfig
from baton.cluster.local_cluster import LocalCluster
from baton.redis_server import EmbeddedRedis
from baton.v1.admin_service_pb2 import WorkerStatus
from benchmarks.chaos.census import Census, is_alive
from benchmarks.chaos.proxies import ADVERTISE, Proxies
from benchmarks.chaos.sight import Sight
from benchmarks.chaos.tcp_proxy import LOOPBACK, TcpProxy
from benchmarks.ledgers import Ledgers, ledger

ROUTERS = ("router-0", "router-1")
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
WORKERS = (*PREFILL, *DECODE)
# The peer of a router's proxy.
CLIENT = "client"
_POLL_S = 0.02


class Rig:
    """The running cluster and its proxies; made by `async with chaos_rig(...)`."""

    def __init__(
        self,
        cluster: LocalCluster,
        sight: Sight,
        proxies: Proxies,
        router_proxies: Mapping[str, TcpProxy],
        census: Census,
    ) -> None:
        self.cluster = cluster
        self.sight = sight
        self._proxies = proxies
        self._router_proxies = router_proxies
        self._census = census
        self._stopped: set[str] = set()
        self._ended: set[int] = set()

    @property
    def routers(self) -> dict[str, str]:
        """Names of the routers by the address where clients connect."""
        return {proxy.address: name for name, proxy in self._router_proxies.items()}

    @property
    def routers_awake(self) -> list[str]:
        """The routers that are not stopped: only they see anything."""
        return [name for name in ROUTERS if name not in self._stopped]

    def proxy(self, name: str) -> TcpProxy | None:
        """The proxy in front of a router or a worker."""
        return self._router_proxies.get(name) or self._proxies.of(name)

    async def find_pids(self) -> dict[str, int]:
        """Process ids by name; those of actors are known from the routers."""
        return self._seen_pids() | self._census.pids()

    def pid(self, name: str) -> int:
        """The process of that name; KeyError if there is none."""
        return self._seen_pids().get(name) or self._census.pid(name)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stops a process with SIGSTOP and lets it go on in the end."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(name)
        try:
            yield
        finally:
            self._stopped.discard(name)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def end(self, name: str, number: signal.Signals) -> None:
        """Ends a process with a signal, and returns once it is gone; it is started again.

        What the routers say of the process is not believed from now on.
        """
        pid = self.pid(name)
        self._ended.add(pid)
        os.kill(pid, number)
        while is_alive(pid):
            await asyncio.sleep(0.005)

    def num_attempts(self, router: str, worker: str) -> int:
        """Attempts of one router at one worker that it can use."""
        ready = self._living(router)
        return ready[worker].num_attempts if worker in ready else 0

    def is_whole(
        self, names: Collection[str], routers: Collection[str] = ROUTERS, since: float = 0.0
    ) -> bool:
        """Whether each of these routers, unless stopped, can use each of these workers, pairs included.

        False if all of them are stopped, for then nobody says so.
        since: a router must have been asked after this moment on the loop's clock.
        """
        asked = [router for router in self.routers_awake if router in routers]
        return bool(asked) and all(
            self.sight.is_since(router, since) and all(self._can_use(router, name) for name in names)
            for router in asked
        )

    def is_paired(self, prefill: str, decode: str, router: str) -> bool:
        """Whether KV can go from the one to the other, as far as this router knows."""
        worker = self._living(router).get(prefill)
        pairs = worker.pairs if worker is not None else ()
        return any(pair.worker == decode and pair.transport for pair in pairs)

    async def wait_whole(
        self, names: Collection[str], within_s: float, routers: Collection[str] = ROUTERS
    ) -> None:
        """Waits until is_whole(), seen from now."""
        since = asyncio.get_running_loop().time()
        async with asyncio.timeout(within_s):
            while not self.is_whole(names, routers, since):
                await asyncio.sleep(_POLL_S)

    async def wait_able(self, router: str, within_s: float) -> None:
        """Waits until a router can use at least one worker of each role."""
        since = asyncio.get_running_loop().time()
        async with asyncio.timeout(within_s):
            while not all(
                any(self.is_whole([name], [router], since) for name in role) for role in (PREFILL, DECODE)
            ):
                await asyncio.sleep(_POLL_S)

    async def scale(self, role: str, num_workers: int, within_s: float) -> None:
        """Sets the number of workers of a role, and waits until all awake routers see as many."""
        await self.cluster.scale(role, num_workers)
        wanted = {f"{role}-{index}" for index in range(num_workers)}
        async with asyncio.timeout(within_s):
            while any(self._of_role(router, role) != wanted for router in self.routers_awake):
                await asyncio.sleep(_POLL_S)

    async def ledgers(self) -> Ledgers:
        """What every process holds, asked directly and not through a proxy."""
        workers = self._living(ROUTERS[0]).values()
        ports = [worker.address.rpartition(":")[2] for worker in workers]
        addresses = [*self.cluster.admin_addresses, *(f"{LOOPBACK}:{port}" for port in ports)]
        return dict([await ledger(address) for address in addresses])

    def _seen_pids(self) -> dict[str, int]:
        return {name: w.pid for router in self.routers_awake for name, w in self._living(router).items()}

    def _living(self, router: str) -> dict[str, WorkerStatus]:
        """What a router can use, less what has been ended here and it has not noticed."""
        return {name: w for name, w in self.sight.ready(router).items() if w.pid not in self._ended}

    def _of_role(self, router: str, role: str) -> set[str]:
        return {name for name in self._living(router) if name.startswith(f"{role}-")}

    def _can_use(self, router: str, name: str) -> bool:
        living = self._living(router)
        if name in PREFILL:
            others = [other for other in DECODE if other in living]
            return bool(others) and all(self.is_paired(name, other, router) for other in others)
        return name in living


@asynccontextmanager
async def chaos_rig(
    model: Path, folder: Path, *, ray: bool, settings: Mapping[str, object], prefix_cache: bool = True
) -> AsyncIterator[Rig]:
    """Starts everything and yields once each router has all workers.

    folder: for the settings of the roles and their logs.
    settings: further fields of ClusterConfig.  prefix_cache: of all workers.
    """
    file = _write_settings(folder, prefix_cache=prefix_cache)
    census = Census()
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(EmbeddedRedis(report=print))
        config = _config(model, folder, redis.url, ray=ray, settings=settings)
        proxies = await stack.enter_async_context(Proxies(redis.url, config.namespace, census.owner))
        starting = LocalCluster.start(config, report=print, config_file=str(file))
        cluster = await stack.enter_async_context(await starting)
        router_proxies = {
            name: await stack.enter_async_context(_client_proxy(address))
            for name, address in zip(ROUTERS, cluster.addresses, strict=True)
        }
        admin = dict(zip(ROUTERS, cluster.admin_addresses, strict=True))
        sight = await stack.enter_async_context(Sight(admin))
        yield Rig(cluster, sight, proxies, router_proxies, census)


def _write_settings(folder: Path, *, prefix_cache: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chaos.toml"
    own = f'advertise = "{ADVERTISE}"\nprefix_cache = {str(prefix_cache).lower()}\n'
    file.write_text(f"[prefill]\n{own}\n[decode]\n{own}", encoding="utf-8")
    return file


def _config(
    model: Path, folder: Path, redis_url: str, *, ray: bool, settings: Mapping[str, object]
) -> ClusterConfig:
    fixed: dict[str, object] = {
        "model": str(model),
        "prefill": len(PREFILL),
        "decode": len(DECODE),
        "routers": len(ROUTERS),
        "ray": ray,
        "redis_url": redis_url,
        "log_dir": str(folder / "logs"),
        "dtype": "float32",
        "threads": 1,
        **dict.fromkeys(("port", "http_port", "admin_port", "dashboard_port", "control_port"), 0),
    }
    return ClusterConfig(**{**fixed, **settings})  # type: ignore[arg-type]


def _client_proxy(router_address: str) -> TcpProxy:
    return TcpProxy(int(router_address.rpartition(":")[2]), lambda _port: CLIENT)
