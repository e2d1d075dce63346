"""A whole cluster on this machine: Redis, router, prefill workers, decode workers.

    async with await LocalCluster.start(ClusterConfig(port=0, admin_port=0, dashboard_port=0)) as cluster:
        async with await AsyncClient.connect(cluster.address) as client:
            ...

Owns the run's folder, the embedded Redis and the supervisor. Everything it started
is gone after the block; if this process is killed, the kernel ends the children.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.cache import cache_dir
from baton.cluster.config import ClusterConfig
from baton.cluster.free_ports import LOOPBACK, claim
from baton.cluster.guard import Guard
from baton.cluster.role_process import RoleProcess
from baton.cluster.roles import POOL, ROUTER, Places, decode_specs, prefill_specs, router_spec
from baton.cluster.status import fetch_status
from baton.cluster.supervisor import Supervisor
from baton.errors import BatonError, ConfigError, Unavailable
from baton.models import ModelDir
from baton.redis_server import EmbeddedRedis
from baton.registry import RedisRegistry
from baton.rpc import OpenChannel
from baton.v1 import admin_service_pb2, common_pb2

Report = Callable[[str], None]
ClusterStatus = admin_service_pb2.GetClusterStatusResponse

_POLL_S = 0.1
# Beyond the grace for requests: joining threads, Ray's own shutdown, one slow disk.
_EXTRA_GRACE_S = 10.0
_NUM_KEPT_RUNS = 10


class LocalCluster:
    """A running cluster. Made by `await LocalCluster.start(config)`; ends with stop() or the block.

    places: its ports and folders.
    """

    def __init__(
        self,
        config: ClusterConfig,
        places: Places,
        opener: OpenChannel,
        supervisor: Supervisor,
        resources: AsyncExitStack,
    ) -> None:
        self.config = config
        self.places = places
        self._opener = opener
        self._supervisor = supervisor
        self._resources = resources
        self._running = asyncio.create_task(supervisor.run(), name="supervisor")

    @classmethod
    async def start(
        cls, config: ClusterConfig, *, report: Report = lambda _line: None, config_file: str = ""
    ) -> Self:
        """Starts everything and returns once all workers are ready.

        report: hears what is waited for, and later of each restart; one line each.
        config_file: TOML file that the roles shall read for what is not set here.

        Call it from the main thread, see baton/tether.py.

        Raises:
            ConfigError: a port is taken, log_dir cannot be made, or a file of TLS is not what it should be;
                nothing was started.
            ModelError: the model is missing or damaged; nothing was started.
            Unavailable: redis_url does not answer; a role failed, with the end of its log; start_timeout_s
                passed.
        """
        config = _resolved(config)
        opener = config.tls.opener()
        ports = _claim_ports(config)
        if config.redis_url:
            # Now, and not when start_timeout_s has passed without a worker in sight.
            async with RedisRegistry(config.redis_url, config.namespace) as registry:
                await registry.check()
        async with AsyncExitStack() as resources:
            guard = await resources.enter_async_context(Guard())
            redis_url = config.redis_url or (await resources.enter_async_context(EmbeddedRedis())).url
            places = _make_places(config, ports, redis_url, config_file)
            guard.own(places.ray_dir)
            supervisor = _supervisor(config, places, guard, report)
            cluster = cls(config, places, opener, supervisor, resources.pop_all())
        try:
            await cluster._until_ready(report)
        except BaseException:
            await cluster.stop()
            raise
        return cluster

    @property
    def address(self) -> str:
        """Where clients connect, host:port."""
        return f"{LOOPBACK}:{self.places.port}"

    @property
    def admin_address(self) -> str:
        """The router's admin port, host:port."""
        return f"{LOOPBACK}:{self.places.admin_port}"

    @property
    def dashboard_url(self) -> str:
        """The Ray dashboard; "" without Ray."""
        if self.config.has_local_ray:
            return self.places.dashboard_url
        return str(_read_facts(self.places.ready_file).get("dashboard_url", ""))

    @property
    def log_dir(self) -> Path:
        """Folder of the logs, one file per process."""
        return self.places.logs

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children: router-0, prefill-N, decode-pool (or decode-N without Ray).

        A decode actor is not our child; status() has its process id.
        """
        return self._supervisor.pids

    async def status(self) -> ClusterStatus:
        """The cluster as its router sees it."""
        return await fetch_status(self.admin_address, opener=self._opener)

    async def wait_ready(self, timeout_s: float) -> ClusterStatus:
        """Waits until every worker is ready, as after a restart; raises Unavailable after timeout_s."""
        return await self._wait(timeout_s, lambda _line: None)

    async def run(self) -> None:
        """Waits until the cluster cannot be kept running, and raises Unavailable then."""
        await asyncio.shield(self._running)

    async def stop(self) -> None:
        """Stops everything in order: router, workers and Ray, Redis. Idempotent; kills what does not end."""
        self._running.cancel()
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            # Whoever waits in run() has heard of it; here it must only not count as overlooked.
            self._running.exception()
        workers = [name for name in self._supervisor.names if name != ROUTER]
        await self._supervisor.stop([[ROUTER], workers], self.config.drain_s + _EXTRA_GRACE_S)
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

    async def _until_ready(self, report: Report) -> None:
        ready = asyncio.create_task(self._wait(self.config.start_timeout_s, report), name="cluster ready")
        try:
            await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._running.done():
            self._running.result()
        ready.result()
        self._supervisor.is_settled = True

    async def _wait(self, timeout_s: float, report: Report) -> ClusterStatus:
        waiting: frozenset[str] = frozenset()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    status, now_waiting = await self._look()
                    if status is not None and not now_waiting:
                        return status
                    if now_waiting != waiting:
                        waiting = now_waiting
                        report(f"waiting for {', '.join(sorted(waiting))}")
                    await asyncio.sleep(_POLL_S)
        raise Unavailable(self._late(waiting or self.config.worker_names, timeout_s))

    async def _look(self) -> tuple[ClusterStatus | None, frozenset[str]]:
        """The status, or None when the router does not answer, and the workers that are not ready."""
        try:
            status = await fetch_status(self.admin_address, timeout_s=2.0, opener=self._opener)
        except BatonError as error:
            if error.field in ("tls_ca", "tls_server_name"):
                # The certificate of this very cluster does not fit its other settings; waiting does not help.
                raise
            return None, self.config.worker_names | {ROUTER}
        refused = [worker for worker in status.workers if worker.state == "refused"]
        if refused:
            raise Unavailable(f"the router refused {refused[0].name}: {refused[0].reason}")
        ready = {worker.name for worker in status.workers if worker.state == "ready" and _is_paired(worker)}
        return status, self.config.worker_names - ready

    def _late(self, waiting: frozenset[str], timeout_s: float) -> str:
        owners = {name if name in self._supervisor.names else POOL for name in waiting}
        logs = "\n".join(
            f"{name}:\n{self._supervisor.process(name).last_lines()}"
            for name in sorted(owners & set(self._supervisor.names))
        )
        return f"not ready within {timeout_s:g} s: {', '.join(sorted(waiting))}. Their logs end with\n{logs}"


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


def _claim_ports(config: ClusterConfig) -> tuple[int, int, int]:
    port = claim(config.port, "port")
    admin_port = claim(config.admin_port, "admin_port")
    return port, admin_port, claim(config.dashboard_port, "dashboard_port") if config.has_local_ray else 0


def _make_places(
    config: ClusterConfig, ports: tuple[int, int, int], redis_url: str, config_file: str
) -> Places:
    logs = Path(config.log_dir).absolute() if config.log_dir else _new_run_folder(cache_dir() / "run")
    try:
        # What a log tells is its owner's.
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_dir {logs} cannot be made: {error.strerror}", field="log_dir") from error
    # Ray puts sockets into its folder, and a socket's path is limited to 107 bytes.
    ray_dir = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp" if Path("/tmp").is_dir() else None))
    port, admin_port, dashboard_port = ports
    return Places(
        port=port,
        admin_port=admin_port,
        dashboard_port=dashboard_port,
        redis_url=redis_url,
        logs=logs,
        ready_file=ray_dir / "pool.json",
        ray_dir=ray_dir,
        config_file=str(Path(config_file).absolute()) if config_file else "",
    )


def _supervisor(config: ClusterConfig, places: Places, guard: Guard, report: Report) -> Supervisor:
    specs = [
        # The pool first: Ray takes longest to start.
        *decode_specs(config, places),
        router_spec(config, places),
        *prefill_specs(config, places),
    ]
    processes = [RoleProcess(spec, places.logs / f"{spec.name}.log", guard) for spec in specs]
    return Supervisor(processes, report=report, rng=random.Random())


def _new_run_folder(runs: Path) -> Path:
    """A new folder for this run; all but the last few runs' folders are removed."""
    runs.mkdir(parents=True, exist_ok=True)
    for old in sorted(path for path in runs.iterdir() if path.is_dir())[: -_NUM_KEPT_RUNS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    folder = runs / f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _read_facts(path: Path) -> dict[str, object]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_paired(worker: admin_service_pb2.WorkerStatus) -> bool:
    """Whether KV can go from it to every decode worker that it knows; true of a decode worker."""
    is_prefill = worker.role == common_pb2.ROLE_PREFILL
    return not is_prefill or (bool(worker.pairs) and all(pair.transport for pair in worker.pairs))
