"""The pool of Ray workers, as the cluster that started it reaches it.

Owns what is known of its workers while the pool itself cannot be asked. It knows the pool's ready file
and its control port, and nothing of Ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.cluster.control import ControlClient
from baton.cluster.worker_states import ROLES
from baton.errors import BatonError, Unavailable
from baton.rpc import OpenChannel
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import DrainResponse, ListWorkersResponse, PoolWorker, ScaleResponse


class PoolLink:
    """One pool, over all its restarts.

    pid: of the pool's process now, or 0.  names: its workers until it has told them itself.
    """

    def __init__(
        self, ready_file: Path, pid: Callable[[], int], names: Iterable[str], opener: OpenChannel
    ) -> None:
        self._ready_file = ready_file
        self._pid = pid
        self._opener = opener
        self._silent_since_s: float | None = None
        self._known = ListWorkersResponse(
            workers=[
                PoolWorker(
                    name=name,
                    role=ROLES[name.rpartition("-")[0]],
                    state=pool_service_pb2.POOL_WORKER_STATE_PLACING,
                    runner="ray",
                )
                for name in sorted(names)
            ]
        )

    @property
    def names(self) -> frozenset[str]:
        """Its workers that are not leaving, as it last told."""
        leaving = pool_service_pb2.POOL_WORKER_STATE_DRAINING
        return frozenset(worker.name for worker in self._known.workers if worker.state != leaving)

    @property
    def dashboard_url(self) -> str:
        """The Ray dashboard; "" until it is known."""
        return str(self._facts().get("dashboard_url", ""))

    async def list_workers(self) -> ListWorkersResponse:
        """Its workers; what it told last, marked as such, while it does not answer."""
        try:
            async with self._control() as control:
                self._known = await control.list_workers()
        except BatonError as error:
            return self._stale(error.message)
        self._silent_since_s = None
        return self._known

    async def scale(self, role: common_pb2.Role.ValueType, num_workers: int) -> ScaleResponse:
        """As ControlClient.scale()."""
        async with self._control() as control:
            response = await control.scale(role, num_workers)
        await self.list_workers()
        return response

    async def drain(self, name: str, *, dry_run: bool, force: bool) -> DrainResponse:
        """As ControlClient.drain()."""
        async with self._control() as control:
            response = await control.drain(name, dry_run=dry_run, force=force)
        await self.list_workers()
        return response

    def _control(self) -> ControlClient:
        facts = self._facts()
        # A file with another process id is that of a pool that has died since.
        address = facts.get("control_address") if facts.get("pid") == self._pid() else None
        if not isinstance(address, str):
            raise Unavailable("the pool that places workers on Ray has not started yet")
        return ControlClient(address, opener=self._opener, timeout_s=5.0)

    def _stale(self, reason: str) -> ListWorkersResponse:
        now_s = asyncio.get_running_loop().time()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        stale = ListWorkersResponse()
        stale.CopyFrom(self._known)
        for worker in stale.workers:
            if worker.state != pool_service_pb2.POOL_WORKER_STATE_PLACING:
                worker.state = pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY
            worker.reason = reason
            worker.since_ms = round(1000 * (now_s - self._silent_since_s))
        return stale

    def _facts(self) -> dict[str, object]:
        try:
            facts = json.loads(self._ready_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}
