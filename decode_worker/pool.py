"""Places decode workers on Ray: one named actor each, in one placement group.

Ray is called when workers are placed, restarted or removed, never per request.
Without an address the pool starts a Ray of its own on loopback, which ends with
the pool; on a given cluster the actors are detached from this process.

Import it after prepare_environment(): Ray reads its environment once.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.errors import Unavailable
from baton.logs import get_logger
from decode_worker.actor import DecodeWorker
from decode_worker.config import DecodeConfig
from decode_worker.pool_config import PoolConfig

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
# A resource of our own: several workers may share the cores of a small machine, which
# one CPU per actor would forbid.
SLOT = "baton_decode"
MAX_SLOTS = 64
# Tokens and KV never pass through Ray's object store; this is the least it accepts.
OBJECT_STORE_BYTES = 80 * 1024 * 1024
# One call waits for the actor's end as long as it lives; the others must not wait behind it.
ACTOR_THREADS = 4

# Ray frees an actor's name some moments after the actor was killed.
NAME_FREE_S = 10.0


class DecodePool:
    """The decode workers of one cluster. Made by `await DecodePool.start(config)`."""

    def __init__(self, config: PoolConfig, dashboard_url: str, group: PlacementGroup) -> None:
        self.dashboard_url = dashboard_url
        self._config = config
        self._group = group
        self._actors: dict[str, Any] = {}

    @classmethod
    async def start(cls, config: PoolConfig) -> DecodePool:
        """Connects to Ray, places the workers and waits until they serve.

        Raises Unavailable if there is no room for them or one of them cannot serve.
        """
        # Ray's start-up blocks for seconds and has no asynchronous form. The thread must live as long
        # as Ray does, because the kernel ends Ray's processes with the thread that started them; the
        # threads of to_thread() live until the loop is closed.
        pool = await asyncio.to_thread(cls._start, config)
        try:
            for name, actor in pool._actors.items():
                await _until_serving(name, actor)
        except BaseException:
            await pool.close()
            raise
        return pool

    @classmethod
    def _start(cls, config: PoolConfig) -> DecodePool:
        dashboard_url = _connect(config)
        bundle: dict[str, float] = {"CPU": 1.0} if config.ray_address else {SLOT: 1.0}
        group = placement_group(
            [bundle] * config.workers, strategy=config.placement, name=f"{config.namespace}-decode"
        )
        if not group.wait(config.placement_timeout_s):
            remove_placement_group(group)
            ray.shutdown()
            raise Unavailable(
                f"Ray found no room for {config.workers} decode workers ({bundle} each, {config.placement}) "
                f"within {config.placement_timeout_s:g} s; start fewer workers or add nodes"
            )
        pool = cls(config, dashboard_url, group)
        for index in range(config.workers):
            _remove_left_over(f"decode-{index}", config.namespace)
            pool._place(index, bundle)
        return pool

    async def watch(self) -> None:
        """Follows the actors until cancelled; raises Unavailable when Ray cannot bring one back."""
        async with asyncio.TaskGroup() as group:
            for name, actor in self._actors.items():
                group.create_task(_watch(name, actor), name=f"watch {name}")

    async def close(self) -> None:
        """Drains and removes the workers, frees their places, and ends a local Ray."""
        await asyncio.to_thread(self._close)

    def _place(self, index: int, bundle: dict[str, float]) -> None:
        name = f"decode-{index}"
        actor_class = ray.remote(DecodeWorker)
        self._actors[name] = actor_class.options(
            name=name,
            namespace=self._config.namespace,
            lifetime="detached" if self._config.ray_address else None,
            num_cpus=bundle.get("CPU", 0.0),
            resources={SLOT: 1.0} if SLOT in bundle else {},
            max_restarts=-1,
            max_concurrency=ACTOR_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        ).remote(_settings(self._config, name))
        log.info("decode worker placed", worker=name)

    def _close(self) -> None:
        stopping = [actor.shutdown.remote() for actor in self._actors.values()]
        ray.wait(stopping, num_returns=len(stopping), timeout=self._config.drain_s + 5.0)
        for actor in self._actors.values():
            ray.kill(actor)
        remove_placement_group(self._group)
        ray.shutdown()


def _connect(config: PoolConfig) -> str:
    """Joins or starts Ray; returns the dashboard's URL, or "" if there is none."""
    if config.ray_address:
        context = _join(config)
    else:
        context = ray.init(
            address="local",
            namespace=config.namespace,
            num_cpus=os.cpu_count(),
            resources={SLOT: MAX_SLOTS},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host=LOOPBACK,
            dashboard_port=config.dashboard_port,
            _node_ip_address=LOOPBACK,
            _temp_dir=config.ray_dir or None,
            log_to_driver=False,
            configure_logging=False,
        )
    _protect_token()
    url = context.dashboard_url
    return f"http://{url}" if url else ""


def _protect_token() -> None:
    """Ray makes its token readable for everybody, and whoever has it can run code on the cluster."""
    token = Path.home() / ".ray" / "auth_token"
    if token.is_file() and token.stat().st_uid == os.getuid():
        token.chmod(0o600)


def _remove_left_over(name: str, namespace: str) -> None:
    """Ends a detached actor of a pool that was killed: its place is gone, but it still holds the name."""
    deadline_s = time.monotonic() + NAME_FREE_S
    while time.monotonic() < deadline_s:
        try:
            left_over = ray.get_actor(name, namespace=namespace)
        except ValueError:
            return
        ray.kill(left_over)
        time.sleep(0.1)
    raise Unavailable(f"Ray still has an actor {name} in namespace {namespace} that will not end")


def _join(config: PoolConfig) -> Any:
    try:
        return ray.init(address=config.ray_address, namespace=config.namespace, log_to_driver=False)
    except (ConnectionError, RayError) as error:
        raise Unavailable(
            f"no Ray cluster answers at {config.ray_address}: {error} (a token goes into RAY_AUTH_TOKEN)"
        ) from None


async def _watch(name: str, actor: Any) -> None:
    """Logs each death and return of one actor; a failed return is raised."""
    while True:
        try:
            await actor.wait_closed.remote()
        except RayActorError:
            log.warning("decode worker lost", worker=name)
        else:
            return
        await _until_serving(name, actor)


async def _until_serving(name: str, actor: Any) -> None:
    """Waits for the actor's constructor, across restarts; raises Unavailable when it fails."""
    try:
        facts = await actor.describe.options(max_task_retries=-1).remote()
    except RayError as error:
        # The rest is a traceback through Ray; the worker's own log has it where it matters.
        last_line = str(error).strip().splitlines()[-1]
        raise Unavailable(f"{name} cannot serve: {last_line}") from None
    log.info("decode worker serving", worker=name, pid=facts["pid"])


def _settings(config: PoolConfig, name: str) -> dict[str, Any]:
    """What one worker needs to know: every field of DecodeConfig, with its own name and log."""
    settings = {spec.name: getattr(config, spec.name) for spec in fields(DecodeConfig)}
    log_file = str(Path(config.log_dir) / f"{name}.log") if config.log_dir else config.log_file
    return settings | {"name": name, "port": 0, "ready_file": "", "log_file": log_file}
