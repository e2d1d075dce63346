"""Runs a pool as a process: its roles, its service, its end.

Import it after prepare_environment(): Ray reads its environment once.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from baton.certificate_watch import CertificateWatch
from baton.config import load_config
from baton.errors import BatonError
from baton.logs import get_logger
from baton.metrics import meter
from baton.pool.config import ROLES, PoolConfig
from baton.pool.config_watch import ConfigWatch
from baton.pool.ray_runtime import RayRuntime
from baton.pool.service import PoolServicer
from baton.pool.worker_pool import WorkerPool
from baton.process import run_until, stop_on_signals, unless_stopped, write_ready_file
from baton.rpc_server import Registration, RpcServer
from baton.v1.pool_service_pb2_grpc import add_PoolServiceServicer_to_server

# Beyond the grace of the attempts, and what a worker that does not leave is given on top of it.
CLOSE_S: Final = 20.0

log = get_logger(__name__)


def pool_classes(config: PoolConfig) -> dict[str, type[WorkerPool]]:
    """The pools of the roles that shall run. By name, because nothing here may import a role."""
    return {
        role: getattr(importlib.import_module(f"{role}_worker.pool"), f"{role.capitalize()}Pool")
        for role in ROLES
        if getattr(config, role)
    }


async def serve(
    config: PoolConfig,
    classes: Mapping[str, type[WorkerPool]],
    environ: Mapping[str, str],
    stop: asyncio.Event,
    watch: ConfigWatch | None = None,
) -> None:
    """Places the workers and keeps them until stop is set, or until none is left.

    watch: sets stop, too, when the settings have changed.

    classes: the pools to run, by role.
    environ: where the sections of the roles are read from.

    Raises Unavailable if workers cannot be placed or kept. End the process by leave() then, because Ray's
    thread may hang.
    """
    settings = {role: _settings(role, cls, environ) for role, cls in classes.items()}
    tls = config.tls
    tls.server_credentials()  # bad files are told before Ray is asked for anything
    runtime = await _start(RayRuntime.start(config), stop)
    # Ray's core has installed a handler of its own, which would end this process without a drain.
    stop_on_signals(stop)
    try:
        await unless_stopped(stop, runtime.claim())
        if stop.is_set():
            return
        pools = [cls(config, settings[role], runtime, random.Random()) for role, cls in classes.items()]
        service = PoolServicer(pools, runtime, dashboard_url=runtime.dashboard_url, drain_s=config.drain_s)
        add = partial(add_PoolServiceServicer_to_server, service)
        async with (
            await RpcServer.start(
                [Registration(name="baton.v1.PoolService", add=add)],
                host=config.control_host,
                port=config.control_port,
                credentials=tls.server_credentials(),
                health_port=config.health_port,
            ) as server,
            _watching(watch, stop),
        ):
            await _keep(config, pools, server, stop, runtime, certificate=CertificateWatch(tls, meter()))
    finally:
        if not await runtime.close():
            # Its thread would keep this process for ever, if that did not end by leave().
            log.warning("ray is gone" if runtime.is_gone else "ray hangs; its processes end with this one")


@asynccontextmanager
async def _watching(watch: ConfigWatch | None, stop: asyncio.Event) -> AsyncIterator[None]:
    if watch is None:
        yield
        return
    task = asyncio.create_task(watch.run(stop), name="watch the settings file")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _start(starting: Awaitable[RayRuntime], stop: asyncio.Event) -> RayRuntime:
    """Ray's start cannot be interrupted. A local Ray is bound to this process and ends with it; at another
    one there is nothing yet that would have to be left in order.
    """
    runtime = await unless_stopped(stop, starting)
    if runtime is None:
        log.info("stopped while Ray was starting")
        os._exit(0)
    return runtime


async def _keep(
    config: PoolConfig,
    pools: Sequence[WorkerPool],
    server: RpcServer,
    stop: asyncio.Event,
    runtime: RayRuntime,
    *,
    certificate: CertificateWatch,
) -> None:
    """From the first worker to the last."""
    try:
        if await unless_stopped(stop, _start_all(config, pools)) is None:
            return
        await server.set_health(ready=True)
        write_ready_file(
            config.ready_file,
            dashboard_url=runtime.dashboard_url,
            control_address=server.address,
            pid=os.getpid(),
        )
        await run_until(stop, runtime.watch(), certificate.run(), *(pool.run() for pool in pools))
    finally:
        await server.set_health(ready=False)
        is_kept = config.leaves_workers(is_asked=stop.is_set())
        with suppress(TimeoutError):
            # Longer than any drain: what is not gone by then waits for Ray, which ends next.
            async with asyncio.timeout(config.drain_s + CLOSE_S):
                await asyncio.gather(*(pool.close(is_kept=is_kept) for pool in pools))


async def _start_all(config: PoolConfig, pools: Sequence[WorkerPool]) -> bool:
    try:
        async with asyncio.TaskGroup() as group:
            for pool in pools:
                group.create_task(pool.start(getattr(config, pool.role)), name=f"start {pool.role} workers")
    except* BatonError as errors:
        raise errors.exceptions[0] from None
    return True


def _settings(role: str, pool_class: type[WorkerPool], environ: Mapping[str, str]) -> Any:
    """The section of a role, as a worker of its own would read it; raises ConfigError."""
    return load_config(pool_class.actor_class.role.config_class, section=role, argv=[], environ=environ)
