"""A whole cluster on this machine: Redis, routers, prefill workers, decode workers.

    config = ClusterConfig(port=0, http_port=0, admin_port=0, control_port=0, dashboard_port=0)
    async with await LocalCluster.start(config) as cluster:
        async with await AsyncClient.connect(cluster.address) as client:
            ...
        await cluster.scale("decode", 2)

Owns the run's folder, the embedded Redis, the supervisor and the control port. Everything
it started is gone after the block; if this process is killed, the kernel ends the children.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.cluster.config import ClusterConfig
from baton.cluster.control_service import ControlService
from baton.cluster.fleet import Fleet
from baton.cluster.fleet_news import FleetNews
from baton.cluster.free_ports import LOOPBACK
from baton.cluster.guard import Guard
from baton.cluster.log_warnings import LogWarnings
from baton.cluster.places import Places, Ports, make_logs
from baton.cluster.pool_link import PoolLink
from baton.cluster.role_process import RoleProcess, RoleSpec
from baton.cluster.role_settings import RoleSettings
from baton.cluster.roles import POOL, pool_counts, pool_spec, router_specs, worker_spec, worker_specs
from baton.cluster.router_views import ClusterStatus, RouterViews, missing
from baton.cluster.start_news import StartNews
from baton.cluster.status import fetch_status
from baton.cluster.supervisor import Supervisor
from baton.cluster.worker_states import ROLES
from baton.errors import BatonError, Unavailable
from baton.models import ModelDir
from baton.redis_server import EmbeddedRedis
from baton.registry import RedisRegistry
from baton.rpc import OpenChannel
from baton.rpc_server import RpcServer
from baton.segment_files import remove_stale
from baton.v1.pool_service_pb2 import DrainResponse, ListWorkersResponse, ScaleResponse

Report = Callable[[str], None]

_POLL_S = 0.1
# How often a running cluster is looked at for news.
_NEWS_S = 1.0
# Beyond the grace for requests: joining threads, Ray's own shutdown, one slow disk.
EXTRA_GRACE_S = 10.0


class LocalCluster:
    """A running cluster. Made by `await LocalCluster.start(config)`; ends with stop() or the block.

    places: its ports and folders.
    """

    def __init__(
        self,
        config: ClusterConfig,
        places: Places,
        opener: OpenChannel,
        *,
        supervisor: Supervisor,
        fleet: Fleet,
        pool: PoolLink | None,
    ) -> None:
        self.config = config
        self.places = places
        self._opener = opener
        self._views = RouterViews(places.admin_addresses, opener)
        # Now, while no worker runs.
        self._start_news = StartNews(places.logs, asyncio.get_running_loop().time())
        self._warnings = LogWarnings(places.logs)
        self._supervisor = supervisor
        self._fleet = fleet
        self._pool = pool
        self._resources = AsyncExitStack()
        self._control: RpcServer | None = None
        self._running = asyncio.create_task(supervisor.run(), name="supervisor")
        self._telling: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: ClusterConfig, *, report: Report = lambda _line: None, config_file: str = ""
    ) -> Self:
        """Starts everything and returns once all workers are ready.

        report: hears what is waited for, and later of each death, restart and change; one line each.
        config_file: TOML file that the roles shall read for what is not set here.

        Call it from the main thread, see baton/tether.py.

        Raises:
            ConfigError: a port is taken, log_dir cannot be made, or a file of TLS or of settings is not what
                it should be; nothing was started.
            ModelError: the model is missing or damaged; nothing was started.
            Unavailable: redis_url does not answer; a role failed, with the end of its log; start_timeout_s
                passed.
        """
        config = _resolved(config)
        tls = config.tls
        opener, credentials = tls.opener(), tls.server_credentials()
        role_settings = RoleSettings(config_file=config_file)
        ports = Ports.claim(config)
        if config.redis_url:
            # Now, and not when start_timeout_s has passed without a worker in sight.
            async with RedisRegistry(config.redis_url, config.namespace) as registry:
                await registry.check()
        logs = make_logs(config)
        async with AsyncExitStack() as resources:
            guard = await resources.enter_async_context(Guard())
            redis_url = config.redis_url
            if not redis_url:
                redis_url = (await resources.enter_async_context(EmbeddedRedis(report=report))).url
            places = Places.make(
                ports, redis_url, logs=logs, config_file=config_file, role_settings=role_settings
            )
            guard.own(places.ray_dir)
            resources.callback(_remove_segments, places)
            cluster = cls._assembled(config, places, opener, guard=guard, report=report)
            cluster._resources = resources.pop_all()
        try:
            cluster._control = await ControlService.serve(
                cluster._fleet, port=ports.control, credentials=credentials
            )
            await cluster._until_ready(report)
            cluster._telling = asyncio.create_task(cluster.tell(report), name="news of the cluster")
        except BaseException:
            await cluster.stop()
            raise
        return cluster

    @classmethod
    def _assembled(
        cls,
        config: ClusterConfig,
        places: Places,
        opener: OpenChannel,
        *,
        guard: Guard,
        report: Report,
    ) -> Self:
        def process(spec: RoleSpec) -> RoleProcess:
            return RoleProcess(spec, places.logs / f"{spec.name}.log", guard)

        workers = [process(spec) for spec in worker_specs(config, places)]
        routers = [process(spec) for spec in router_specs(config, places)]
        supervisor = Supervisor([*workers, *routers], report=report, rng=random.Random())
        pool = _pool_link(config, places, opener, supervisor) if config.ray else None
        placement = config.placement or places.role_settings.text("router", "placement", "auto")
        fleet = Fleet(
            config,
            supervisor=supervisor,
            views=RouterViews(places.admin_addresses, opener),
            pool=pool,
            make_process=lambda role, index: process(worker_spec(config, places, role=role, index=index)),
            grace_s=config.drain_s + EXTRA_GRACE_S,
            is_colocated=placement == "colocated",
        )
        return cls(config, places, opener, supervisor=supervisor, fleet=fleet, pool=pool)

    @property
    def addresses(self) -> list[str]:
        """Where clients connect, host:port, one per router."""
        return list(self.places.addresses.values())

    @property
    def address(self) -> str:
        """The first of them."""
        return self.addresses[0]

    @property
    def http_urls(self) -> list[str]:
        """Where OpenAI's clients find the routers: their base_url, in the same order."""
        scheme = "https" if self.config.tls_ca else "http"
        return [f"{scheme}://{address}/v1" for address in self.places.http_addresses.values()]

    @property
    def admin_addresses(self) -> list[str]:
        """The routers' admin ports, host:port, in the same order."""
        return list(self.places.admin_addresses.values())

    @property
    def admin_address(self) -> str:
        """The first of them."""
        return self.admin_addresses[0]

    @property
    def control_address(self) -> str:
        """The port of `baton workers`, `baton scale` and `baton drain`, host:port."""
        return f"{LOOPBACK}:{self.places.ports.control}"

    @property
    def dashboard_url(self) -> str:
        """The Ray dashboard; "" without Ray."""
        if self.config.has_local_ray:
            return self.places.dashboard_url
        return self._pool.dashboard_url if self._pool is not None else ""

    @property
    def log_dir(self) -> Path:
        """Folder of the logs, one file per process."""
        return self.places.logs

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children: router-N, prefill-N, decode-N, and pool for the workers on Ray.

        An actor is not our child; workers() has its process id.
        """
        return self._supervisor.pids

    async def status(self) -> ClusterStatus:
        """The cluster as its first router sees it."""
        return await fetch_status(self.admin_address, opener=self._opener)

    async def workers(self) -> ListWorkersResponse:
        """All workers, by name, and how far each one is."""
        return await self._fleet.list_workers()

    async def scale(self, role: str, num_workers: int) -> ScaleResponse:
        """Sets how many workers of a role, "prefill" or "decode", there shall be; does not wait for them.

        Raises InvalidRequest where that cannot be; wait_ready() waits for those that are added.
        """
        return await self._fleet.scale(ROLES[role], num_workers)

    async def drain(self, name: str, *, dry_run: bool = False, force: bool = False) -> DrainResponse:
        """Drains a worker and removes it, or says what that would mean; does not wait for its end.

        force: even if no other worker of its role serves. Raises InvalidRequest where that cannot be.
        """
        return await self._fleet.drain(name, dry_run=dry_run, force=force)

    async def wait_ready(self, timeout_s: float) -> ClusterStatus:
        """Waits until every router can use every worker that is to stay, as after a restart.

        Returns the status of the first router; raises Unavailable after timeout_s seconds.
        """
        return await self._wait(timeout_s, lambda _waiting: None)

    async def run(self) -> None:
        """Waits until the cluster cannot be kept running, and raises Unavailable then."""
        tasks = [task for task in (self._running, self._telling) if task is not None]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def tell(self, report: Report) -> None:
        """Reports what happens to the workers, what their logs warn of, who comes back, until cancelled."""
        news = FleetNews()
        while True:
            try:
                lines = news.lines(await self._fleet.list_workers(), self._fleet.answering)
            except BatonError as error:
                lines = news.unknown(error.message)
            for line in (*self._warnings.lines(), *lines):
                report(line)
            await asyncio.sleep(_NEWS_S)

    async def stop(self) -> None:
        """Stops everything in order: routers, workers and Ray, Redis. Idempotent; kills what does not end."""
        await _cancelled(self._telling)
        # Before the supervisor: nothing would end what somebody adds after its end.
        if self._control is not None:
            await self._control.stop()
        await self._fleet.close()
        await _cancelled(self._running)
        if not self._running.cancelled():
            # Whoever waits in run() has heard of it; here it must only not count as overlooked.
            self._running.exception()
        await self._supervisor.stop(self._stages(), self.config.drain_s + EXTRA_GRACE_S)
        await self._resources.aclose()

    def kill(self) -> None:
        """Kills every child at once, without waiting; stop() must still follow."""
        self._supervisor.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _stages(self) -> Sequence[Sequence[str]]:
        routers = self.config.router_names
        return routers, [name for name in self._supervisor.names if name not in routers]

    async def _until_ready(self, report: Report) -> None:
        def tell(waiting: frozenset[str]) -> None:
            if line := self._start_news.line(waiting, asyncio.get_running_loop().time()):
                report(line)

        ready = asyncio.create_task(self._wait(self.config.start_timeout_s, tell), name="cluster ready")
        try:
            await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._running.done():
            self._running.result()
        ready.result()
        self._supervisor.is_settled = True

    async def _wait(self, timeout_s: float, tell: Callable[[frozenset[str]], None]) -> ClusterStatus:
        waiting: frozenset[str] = frozenset()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    views = await self._views.look()
                    waiting = missing(views, self._fleet.names)
                    first = views[self.config.router_names[0]]
                    if first is not None and not waiting:
                        return first
                    tell(waiting)
                    await asyncio.sleep(_POLL_S)
        raise Unavailable(self._late(waiting or self._fleet.names, timeout_s))

    def _late(self, waiting: frozenset[str], timeout_s: float) -> str:
        owners = {name if name in self._supervisor.names else POOL for name in waiting}
        logs = "\n".join(
            f"{name}:\n{self._supervisor.process(name).last_lines()}"
            for name in sorted(owners & set(self._supervisor.names))
        )
        names = ", ".join(sorted(waiting))
        return (
            f"not ready within {timeout_s:g} s (start_timeout_s; a large model may need more): {names}. "
            f"Their logs end with\n{logs}"
        )


def _resolved(config: ClusterConfig) -> ClusterConfig:
    """The config with absolute paths, because the roles run in another folder; raises ModelError."""
    model = ModelDir.open(config.model)
    is_folder = Path(config.model).expanduser().is_dir()
    return replace(
        config,
        model=str(model.path) if is_folder else config.model,
        trace_file=_absolute(config.trace_file),
        tls_cert=_absolute(config.tls_cert),
        tls_key=_absolute(config.tls_key),
        tls_ca=_absolute(config.tls_ca),
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _pool_link(
    config: ClusterConfig, places: Places, opener: OpenChannel, supervisor: Supervisor
) -> PoolLink:
    def keep(counts: Mapping[str, int]) -> None:
        supervisor.process(POOL).spec = pool_spec(config, places, counts)

    return PoolLink(
        places.ready_file, lambda: supervisor.pids.get(POOL, 0), pool_counts(config), opener, keep=keep
    )


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


def _remove_segments(places: Places) -> None:
    """What workers that were killed have left behind in shared memory."""
    for folder in places.shm_folders:
        remove_stale(folder)
