"""How far the workers that are plain processes are: what the supervisor knows, joined with what routers see.

A plain core: no process, no network, no clock. A process that lives may still load its model, and one
that a router lost may still live; only both together say whether it serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.cluster.life import Life
from baton.cluster.router_views import ClusterStatus
from baton.v1 import admin_service_pb2, common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import PoolWorker, PoolWorkerState

_SERVING = pool_service_pb2.POOL_WORKER_STATE_SERVING
_UNHEALTHY = pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY
ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process now. role: "prefill" or "decode".  pid: 0 while it does not run."""

    name: str
    role: str
    life: Life
    pid: int


@dataclass(slots=True)
class _Seen:
    """What a worker was when it was last looked at, and since when."""

    state: PoolWorkerState.ValueType
    pid: int
    since_s: float
    served_pid: int = 0


class WorkerStates:
    """Remembers since when each worker has been what it is. node: address of this machine."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._seen: dict[str, _Seen] = {}

    def update(
        self, processes: Sequence[ProcessFacts], views: Iterable[ClusterStatus], now_s: float
    ) -> list[PoolWorker]:
        """The workers in the same order; what is no longer among them is forgotten."""
        found = [worker for view in views for worker in view.workers]
        known = {process.name for process in processes}
        self._seen = {name: seen for name, seen in self._seen.items() if name in known}
        return [self._describe(process, _at_routers(process, found), now_s) for process in processes]

    def _describe(
        self, process: ProcessFacts, at_routers: list[admin_service_pb2.WorkerStatus], now_s: float
    ) -> PoolWorker:
        before = self._seen.get(process.name)
        has_served = before is not None and before.served_pid == process.pid != 0
        state, reason = _state_of(process, at_routers, has_served=has_served)
        served_pid = process.pid if state == _SERVING or has_served else 0
        if before is None or (before.state, before.pid) != (state, process.pid):
            before = _Seen(state, process.pid, now_s)
        before.served_pid = served_pid
        self._seen[process.name] = before
        return PoolWorker(
            name=process.name,
            role=ROLES[process.role],
            state=state,
            reason=reason,
            node=self._node,
            pid=process.pid,
            runner="process",
            num_restarts=process.life.num_restarts,
            since_ms=round(1000 * (now_s - before.since_s)),
            num_attempts=sum(worker.num_attempts for worker in at_routers),
            release=next((worker.release for worker in at_routers if worker.release), ""),
        )


def _at_routers(
    process: ProcessFacts, found: list[admin_service_pb2.WorkerStatus]
) -> list[admin_service_pb2.WorkerStatus]:
    """What the routers say about this very process, and not about an earlier one of its name.

    A process that was refused has not told its id: it counts where no router knows more.
    """
    named = [worker for worker in found if worker.name == process.name]
    known = [worker for worker in named if worker.pid == process.pid != 0]
    return known or [worker for worker in named if _is_refused(worker) and process.pid]


def with_refusals(workers: Iterable[PoolWorker], views: Sequence[ClusterStatus]) -> Iterator[PoolWorker]:
    """The workers of a pool, which knows that they serve, but not that the routers do not want them."""
    for worker in workers:
        named = [each for view in views for each in view.workers if each.name == worker.name]
        if worker.state == _SERVING and named and all(_is_refused(each) for each in named):
            refused = PoolWorker()
            refused.CopyFrom(worker)
            refused.state, refused.reason = _UNHEALTHY, named[0].reason
            yield refused
        else:
            yield worker


def _is_refused(worker: admin_service_pb2.WorkerStatus) -> bool:
    return worker.state == "refused"


def _state_of(
    process: ProcessFacts, at_routers: list[admin_service_pb2.WorkerStatus], *, has_served: bool
) -> tuple[PoolWorkerState.ValueType, str]:
    """The state and, where it does not serve, why."""
    match process.life.state:
        case "failed":
            return pool_service_pb2.POOL_WORKER_STATE_FAILED, process.life.reason
        case "restarting":
            return pool_service_pb2.POOL_WORKER_STATE_RESTARTING, process.life.reason
        case "draining":
            return pool_service_pb2.POOL_WORKER_STATE_DRAINING, "it is asked to leave"
        case "running":
            return _running_state(at_routers, has_served=has_served)


def _running_state(
    at_routers: list[admin_service_pb2.WorkerStatus], *, has_served: bool
) -> tuple[PoolWorkerState.ValueType, str]:
    states = {worker.state for worker in at_routers}
    if any(_serves(worker) for worker in at_routers):
        return _SERVING, ""
    if "draining" in states:
        return pool_service_pb2.POOL_WORKER_STATE_DRAINING, "it leaves by itself, and is started again"
    lonely = "it has no decode worker to send KV to" if "ready" in states else "no router has met it yet"
    reason = next((worker.reason for worker in at_routers if worker.reason), lonely)
    if has_served or "refused" in states:
        return _UNHEALTHY, reason
    return pool_service_pb2.POOL_WORKER_STATE_STARTING, reason


def _serves(worker: admin_service_pb2.WorkerStatus) -> bool:
    is_prefill = worker.role == common_pb2.ROLE_PREFILL
    return worker.state == "ready" and (not is_prefill or any(pair.transport for pair in worker.pairs))
