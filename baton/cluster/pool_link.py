"""The pool of Ray workers, as the cluster that started it reaches it.

Owns what is known of its workers while the pool itself cannot be asked, and how many a pool that is started
again shall have. It knows the pool's ready file and its control port, and nothing of Ray.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.cluster.control import ControlClient
from baton.cluster.worker_states import ROLES
from baton.errors import BatonError, PeerLost, Unavailable
from baton.rpc import OpenChannel
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import DrainResponse, ListWorkersResponse, PoolWorker, ScaleResponse

_PLACING = pool_service_pb2.POOL_WORKER_STATE_PLACING
_DRAINING = pool_service_pb2.POOL_WORKER_STATE_DRAINING
_UNHEALTHY = pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY
_RESTARTING = pool_service_pb2.POOL_WORKER_STATE_RESTARTING
_ROLE_NAMES = {value: name for name, value in ROLES.items()}
# How long it may take to answer, in seconds.
_ASK_S = 5.0
_THE_POOL = "the pool that places workers on Ray"


class _PoolControl(ControlClient):
    """Its port is the cluster's own affair, and no address that a caller could correct.

    absence: raised when the port is closed, because the pool is not there.
    """

    def __init__(self, address: str, opener: OpenChannel, absence: PeerLost) -> None:
        super().__init__(address, opener=opener, timeout_s=_ASK_S)
        self._absence = absence

    def _silence(self, *, is_closed: bool) -> Unavailable:
        return self._absence if is_closed else Unavailable(f"{_THE_POOL} does not answer")


class PoolLink:
    """One pool, over all its restarts.

    pid: of the pool's process now, or 0.
    counts: its workers by role at the start, until it has told them itself.
    keep: hears how many of each role the next start of the pool shall have, whenever that changes.
    """

    def __init__(
        self,
        ready_file: Path,
        pid: Callable[[], int],
        counts: Mapping[str, int],
        opener: OpenChannel,
        *,
        keep: Callable[[Mapping[str, int]], None],
    ) -> None:
        self._ready_file = ready_file
        self._pid = pid
        self._opener = opener
        self._keep = keep
        # What the next start of the pool shall have, what this one was told to have, and which one that is.
        self._counts, self._wanted, self._told_pid = dict(counts), dict(counts), 0
        self._silent_since_s: float | None = None
        self._has_answered = False
        self._known = ListWorkersResponse(
            workers=[
                PoolWorker(name=f"{role}-{index}", role=ROLES[role], state=_PLACING, runner="ray")
                for role, count in sorted(counts.items())
                for index in range(count)
            ]
        )

    @property
    def names(self) -> frozenset[str]:
        """Its workers that are not leaving, as it last told."""
        return frozenset(worker.name for worker in self._known.workers if worker.state != _DRAINING)

    @property
    def is_answering(self) -> bool:
        """Whether it answered when its workers were listed last."""
        return self._has_answered and self._silent_since_s is None

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
            return self._stale(error)
        self._silent_since_s, self._has_answered = None, True
        self._count()
        return self._known

    async def scale(self, role: common_pb2.Role.ValueType, num_workers: int) -> ScaleResponse:
        """As ControlClient.scale()."""
        async with self._control() as control:
            response = await control.scale(role, num_workers)
        self._want(role, num_workers)
        await self.list_workers()
        return response

    async def drain(self, name: str, *, dry_run: bool, force: bool) -> DrainResponse:
        """As ControlClient.drain()."""
        async with self._control() as control:
            response = await control.drain(name, dry_run=dry_run, force=force)
        if not dry_run and response.worker.state != _DRAINING:
            self._want(response.worker.role, self._wanted[_ROLE_NAMES[response.worker.role]] - 1)
        await self.list_workers()
        return response

    def _control(self) -> ControlClient:
        facts = self._facts()
        # A file with another process id is that of a pool that has died since.
        address = facts.get("control_address") if facts.get("pid") == self._pid() else None
        if not isinstance(address, str):
            raise self._absence()
        if self._told_pid != self._pid():
            self._told_pid, self._wanted = self._pid(), dict(self._counts)
        return _PoolControl(address, self._opener, self._absence())

    def _absence(self) -> PeerLost:
        how = "is being started again" if self._has_answered else "has not started yet"
        return PeerLost(f"{_THE_POOL} {how}")

    def _want(self, role: common_pb2.Role.ValueType, num_workers: int) -> None:
        # A pool that begins without a role cannot have workers of it later.
        self._wanted[_ROLE_NAMES[role]] = max(num_workers, 1)

    def _count(self) -> None:
        """Tells what the next start shall have: what is wanted, but for those that there is no room for.

        A pool that waits for room in vain at its start ends, and takes the other workers along.
        """
        waiting = Counter(worker.role for worker in self._known.workers if _has_no_room(worker))
        counts = {
            role: max(wanted - waiting[ROLES[role]], min(wanted, 1)) for role, wanted in self._wanted.items()
        }
        if counts != self._counts:
            self._counts = counts
            self._keep(counts)

    def _stale(self, error: BatonError) -> ListWorkersResponse:
        now_s = asyncio.get_running_loop().time()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        stale = ListWorkersResponse()
        stale.CopyFrom(self._known)
        for worker in stale.workers:
            if worker.state != _PLACING:
                worker.state = _RESTARTING if isinstance(error, PeerLost) else _UNHEALTHY
            worker.reason = error.message
            worker.since_ms = round(1000 * (now_s - self._silent_since_s))
        return stale

    def _facts(self) -> dict[str, object]:
        try:
            facts = json.loads(self._ready_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}


def _has_no_room(worker: PoolWorker) -> bool:
    """Whether Ray has no place for it, which its reason tells."""
    return worker.state == _PLACING and bool(worker.reason)
