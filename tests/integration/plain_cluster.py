"""Roles as plain processes that a test starts one by one, on a Redis of its own choice.

Owns the processes and their logs. Nobody starts them again: a test that wants a death or a newcomer makes it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from baton.cluster.free_ports import LOOPBACK, claim
from baton.cluster.guard import Guard
from baton.cluster.role_process import RoleProcess, RoleSpec
from baton.cluster.status import fetch_status
from baton.errors import BatonError
from tests.integration.ledgers import Ledgers, ledger

READY_WITHIN_S = 60.0
_GRACE_S = 10.0
_POLL_S = 0.05
_WORKER_SETTINGS = ("--dtype=float32", "--threads=1", f"--kv-cache-bytes={16 << 20}", "--port=0")
_MODULES: Mapping[str, str] = {
    "router": "router", "prefill": "prefill_worker", "decode": "decode_worker"
}  # fmt: skip


class PlainCluster:
    """The running processes, by name; made by `async with plain_cluster(...)`.

    doors, admin_doors: addresses of the routers by name, where a later process of the name is found too.
    """

    def __init__(self, model: Path, logs: Path, redis_url: str, guard: Guard) -> None:
        self.doors: dict[str, str] = {}
        self.admin_doors: dict[str, str] = {}
        for name in ("router-0", "router-1"):
            self.doors[name] = f"{LOOPBACK}:{claim(0, 'port')}"
            self.admin_doors[name] = f"{LOOPBACK}:{claim(0, 'admin_port')}"
        self.address, self.admin_address = self.doors["router-0"], self.admin_doors["router-0"]
        self.processes: dict[str, RoleProcess] = {}
        self._model = model
        self._logs = logs
        self._redis_url = redis_url
        self._guard = guard

    async def start(self, name: str, *settings: str) -> None:
        """Starts a role, named like "decode-1", and does not wait for it."""
        role = name.partition("-")[0]
        own = self._router_settings(name) if role == "router" else _WORKER_SETTINGS
        common = (f"--name={name}", f"--model={self._model}", "--drain-s=1")
        spec = RoleSpec(
            name=name,
            role=role,
            command=("-m", _MODULES[role], *common, *own, *settings),
            environment={f"BATON_{role.upper()}_REDIS_URL": self._redis_url},
        )
        self.processes[name] = RoleProcess(spec, self._logs / f"{name}.log", self._guard)
        await self.processes[name].start()

    def events(self, name: str) -> list[dict[str, Any]]:
        """What a process has logged."""
        lines = (self._logs / f"{name}.log").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def ready(self, router: str = "router-0") -> set[str]:
        """The workers that take requests of a router; none while it does not answer."""
        with suppress(BatonError):
            status = await fetch_status(self.admin_doors[router], timeout_s=1.0)
            return {worker.name for worker in status.workers if worker.state == "ready"}
        return set()

    async def wait_ready(
        self, *names: str, router: str = "router-0", within_s: float = READY_WITHIN_S
    ) -> None:
        """Waits until the router can use these workers."""
        async with asyncio.timeout(within_s):
            while not await self.ready(router) >= set(names):
                await asyncio.sleep(_POLL_S)

    async def ledgers(self) -> Ledgers:
        """What the router and every ready worker hold."""
        status = await fetch_status(self.admin_address)
        addresses = [self.admin_address] + [w.address for w in status.workers if w.state == "ready"]
        return dict([await ledger(address) for address in addresses])

    async def settled(self, expected: Ledgers, within_s: float) -> Ledgers:
        """The ledgers as soon as they are the expected ones; whatever they are after within_s seconds."""
        deadline = asyncio.get_running_loop().time() + within_s
        while (found := await self.ledgers()) != expected and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_S)
        return found

    def _router_settings(self, name: str) -> tuple[str, ...]:
        port, admin_port = (at.rpartition(":")[2] for at in (self.doors[name], self.admin_doors[name]))
        ports = (f"--port={port}", "--http-port=0", f"--admin-port={admin_port}")
        return (*ports, "--placement=disaggregated")


@asynccontextmanager
async def plain_cluster(model: Path, logs: Path, redis_url: str) -> AsyncIterator[PlainCluster]:
    """No process yet; ends all that were started."""
    async with Guard() as guard:
        cluster = PlainCluster(model, logs, redis_url, guard)
        try:
            yield cluster
        finally:
            await asyncio.gather(*(process.stop(_GRACE_S) for process in cluster.processes.values()))
