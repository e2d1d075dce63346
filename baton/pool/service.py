"""The service by which people see and change a pool: `baton workers`, `baton scale`, `baton drain`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from baton.errors import InvalidRequest
from baton.pool.life import EXTRA_GRACE_S
from baton.pool.member import Member
from baton.pool.runtime import Runtime
from baton.pool.worker_pool import WorkerPool
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2_grpc import PoolServiceServicer

_ROLES: Mapping[str, common_pb2.Role.ValueType] = {
    "prefill": common_pb2.ROLE_PREFILL,
    "decode": common_pb2.ROLE_DECODE,
}


class PoolServicer(PoolServiceServicer):
    """Answers for the pools of one process.

    drain_s: grace for the attempts of a worker that leaves.
    """

    def __init__(
        self, pools: Sequence[WorkerPool], runtime: Runtime, *, dashboard_url: str, drain_s: float
    ) -> None:
        self._pools = pools
        self._runtime = runtime
        self._dashboard_url = dashboard_url
        self._drain_s = drain_s

    async def ListWorkers(  # noqa: N802 - gRPC name
        self, request: pool_service_pb2.ListWorkersRequest, context: object
    ) -> pool_service_pb2.ListWorkersResponse:
        """All workers, by name."""
        del request, context
        members = sorted((member for pool in self._pools for member in pool.members), key=lambda m: m.name)
        return pool_service_pb2.ListWorkersResponse(
            workers=[describe(member) for member in members],
            dashboard_url=self._dashboard_url,
            ray_silent_ms=round(self._runtime.silent_s * 1000),
        )

    async def Scale(  # noqa: N802 - gRPC name
        self, request: pool_service_pb2.ScaleRequest, context: object
    ) -> pool_service_pb2.ScaleResponse:
        """Takes down how many workers there shall be."""
        del context
        added, removed = self._pool_of(request.role).scale(request.num_workers)
        return pool_service_pb2.ScaleResponse(added=added, removed=removed)

    async def Drain(  # noqa: N802 - gRPC name
        self, request: pool_service_pb2.DrainRequest, context: object
    ) -> pool_service_pb2.DrainResponse:
        """Takes down that one worker is to leave."""
        del context
        pool, member = self._find(request.name)
        before = describe(member)
        num_others = pool.drain(member, dry_run=request.dry_run, force=request.force)
        return pool_service_pb2.DrainResponse(
            worker=before,
            num_others=num_others,
            grace_ms=round((self._drain_s + EXTRA_GRACE_S) * 1000),
        )

    def _pool_of(self, role: common_pb2.Role.ValueType) -> WorkerPool:
        for pool in self._pools:
            if _ROLES[pool.role] == role:
                return pool
        kept = " and ".join(pool.role for pool in self._pools)
        raise InvalidRequest(f"this pool runs {kept} workers only; start it with others too", field="role")

    def _find(self, name: str) -> tuple[WorkerPool, Member]:
        found = {member.name: (pool, member) for pool in self._pools for member in pool.members}
        if name not in found:
            raise InvalidRequest(
                f"there is no worker {name!r}; there are {', '.join(sorted(found))}", field="name"
            )
        return found[name]


def describe(member: Member) -> pool_service_pb2.PoolWorker:
    """A member as the wire has it."""
    life = member.life
    is_running = life.facts is not None and member.is_up
    return pool_service_pb2.PoolWorker(
        name=member.name,
        role=_ROLES[member.spec.role],
        state=member.state.value,
        reason=member.reason,
        node=life.place.address if life.place else "",
        pid=life.facts.pid if life.facts and is_running else 0,
        runner="ray",
        num_restarts=member.num_restarts,
        since_ms=round((asyncio.get_running_loop().time() - member.since_s) * 1000),
        num_attempts=life.load.num_attempts if life.load and is_running else 0,
        resources=str(member.spec.ask),
        actor_id=life.handle.actor_id if life.handle else "",
        release=life.facts.release if life.facts and is_running else "",
    )
