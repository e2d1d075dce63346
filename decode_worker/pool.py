"""Places decode workers on Ray: one named actor each, in one placement group.

Ray is called when workers are placed, restarted or removed, never per request.
Without an address the pool starts a Ray of its own on loopback, which ends with
the pool; on a given cluster the actors are detached from this process.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import fields
from typing import Any

import ray
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


class DecodePool:
    """The decode workers of one cluster. Made by `await DecodePool.start(config)`."""

    def __init__(self, config: PoolConfig, dashboard_url: str, group: PlacementGroup) -> None:
        self.dashboard_url = dashboard_url
        self._config = config
        self._group = group
        self._actors: dict[str, Any] = {}

    @classmethod
    async def start(cls, config: PoolConfig) -> DecodePool:
        """Connects to Ray and places the workers; raises Unavailable if there is no room for them."""
        # Ray's start-up blocks for seconds and has no asynchronous form.
        return await asyncio.to_thread(cls._start, config)

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
            pool._place(index, bundle)
        return pool

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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.ray_address:
        context = ray.init(address=config.ray_address, namespace=config.namespace, log_to_driver=False)
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
            log_to_driver=False,
            configure_logging=False,
        )
    url = context.dashboard_url
    return f"http://{url}" if url else ""


def _settings(config: PoolConfig, name: str) -> dict[str, Any]:
    """What one worker needs to know: every field of DecodeConfig, with its own name."""
    settings = {spec.name: getattr(config, spec.name) for spec in fields(DecodeConfig)}
    return settings | {"name": name, "port": 0, "ready_file": ""}
