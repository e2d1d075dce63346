"""Which workers a local cluster has, and how that changes: plain processes here, Ray's through their pool.

Owns the decisions of scale and drain for plain processes, and the tasks that remove them. Processes
themselves are the supervisor's, actors the pool's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from baton.cluster.config import ClusterConfig
from baton.cluster.defaults import MAX_WORKERS
from baton.cluster.free_ports import LOOPBACK
from baton.cluster.pool_link import PoolLink
from baton.cluster.role_process import RoleProcess
from baton.cluster.roles import POOL, WORKER_ROLES
from baton.cluster.router_views import ClusterStatus, RouterViews, Views
from baton.cluster.supervisor import Supervisor
from baton.cluster.worker_states import ROLES, ProcessFacts, WorkerStates, with_refusals
from baton.drain import last_of_role
from baton.errors import InvalidRequest, Unavailable
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import DrainResponse, ListWorkersResponse, PoolWorker, ScaleResponse

# Makes the process of a worker: its role, its index.
MakeProcess = Callable[[str, int], RoleProcess]


class Fleet:
    """The workers of one cluster.

    pool: where there are workers on Ray.
    grace_s: how long a process may take to drain before it is killed, in seconds.
    is_colocated: decode workers compute all prompts, so that prefill workers would have nothing to do.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        supervisor: Supervisor,
        views: RouterViews,
        pool: PoolLink | None,
        make_process: MakeProcess,
        grace_s: float,
        is_colocated: bool,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._views = views
        self._pool = pool
        self._make_process = make_process
        self._grace_s = grace_s
        self._is_colocated = is_colocated
        self._states = WorkerStates(LOOPBACK)
        self._changing = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._answering: dict[str, int] = {}

    @property
    def answering(self) -> Mapping[str, int]:
        """The routers, and the pool, that answered when the workers were listed last; their process ids."""
        return self._answering

    @property
    def names(self) -> frozenset[str]:
        """The workers that are not leaving."""
        here = {name for role in WORKER_ROLES for name in self._supervisor.staying(role)}
        return frozenset(here | (self._pool.names if self._pool is not None else frozenset()))

    async def list_workers(self) -> ListWorkersResponse:
        """All workers, by name."""
        response = ListWorkersResponse()
        if self._pool is not None:
            response.CopyFrom(await self._pool.list_workers())
        views = await self._views.look()
        self._answering = self._pids_of(views)
        seen = [view for view in views.values() if view is not None]
        workers = [*with_refusals(response.workers, seen), *self._here(seen)]
        workers.sort(key=_by_role_and_index)
        del response.workers[:]
        response.workers.extend(workers)
        return response

    async def scale(self, role: common_pb2.Role.ValueType, num_workers: int) -> ScaleResponse:
        """Adds workers until there are that many, or drains and removes some; raises InvalidRequest.

        Those that were given up go first, then those with the highest index; those that were given up and
        stay are tried again. Raises Unavailable once the cluster ends.
        """
        name = self._checked_role(role)
        if not 1 <= num_workers <= MAX_WORKERS:
            raise InvalidRequest(
                f"num_workers is {num_workers}; it must be 1 to {MAX_WORKERS}", field="num_workers"
            )
        async with self._changing:
            self._check_open()
            if self._pool is not None and self._config.is_on_ray(name):
                return await self._pool.scale(role, num_workers)
            return await self._scale_processes(name, num_workers)

    async def drain(self, name: str, *, dry_run: bool, force: bool) -> DrainResponse:
        """Drains one worker and removes it, or says what that would mean; raises InvalidRequest.

        force: even if no other worker of its role serves.
        """
        async with self._changing:
            self._check_open()
            workers = (await self.list_workers()).workers
            worker = next((worker for worker in workers if worker.name == name), None)
            if worker is None:
                names = ", ".join(worker.name for worker in workers)
                raise InvalidRequest(f"there is no worker {name!r}; there are {names}", field="name")
            if self._pool is not None and worker.runner == "ray":
                return await self._pool.drain(name, dry_run=dry_run, force=force)
            response = DrainResponse(
                worker=worker,
                num_others=sum(_serves_beside(worker, other) for other in workers),
                grace_ms=round(1000 * self._grace_s),
            )
            if not dry_run:
                self._check_may_leave(response, force=force)
                self._remove([name])
            return response

    async def close(self) -> None:
        """Changes nothing any more, and leaves what is being removed to whoever stops the supervisor."""
        self._is_closed = True
        async with self._changing:
            # What has begun before has started all it will start.
            pass
        for task in self._removals:
            task.cancel()
        if self._removals:
            await asyncio.wait(self._removals)

    def _pids_of(self, views: Views) -> dict[str, int]:
        names = {name for name, view in views.items() if view is not None}
        if self._pool is not None and self._pool.is_answering:
            names.add(POOL)
        return {name: pid for name, pid in self._supervisor.pids.items() if name in names}

    def _here(self, views: Iterable[ClusterStatus]) -> list[PoolWorker]:
        processes = [
            ProcessFacts(
                name=name,
                role=self._supervisor.process(name).spec.role,
                life=self._supervisor.life(name),
                pid=self._supervisor.pids.get(name, 0),
            )
            for name in self._supervisor.names
            if self._supervisor.process(name).spec.role in WORKER_ROLES
        ]
        return self._states.update(processes, views, asyncio.get_running_loop().time())

    def _checked_role(self, role: common_pb2.Role.ValueType) -> str:
        name = next((name for name, value in ROLES.items() if value == role), None)
        if name is None:
            raise InvalidRequest("role must be prefill or decode", field="role")
        if name == "prefill" and self._is_colocated:
            raise InvalidRequest(
                "this cluster is colocated: its decode workers compute all prompts, and a prefill worker has "
                "nothing to do; scale decode, or start it with --placement=auto",
                field="role",
            )
        return name

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("this cluster ends; its workers change no more")

    async def _scale_processes(self, role: str, num_workers: int) -> ScaleResponse:
        staying = self._supervisor.staying(role)
        removed = self._least_wanted(staying)[: max(0, len(staying) - num_workers)]
        failed = [name for name in staying if self._has_failed(name) and name not in removed]
        for name in failed:
            # No process is left of it: this only forgets its deaths.
            await self._supervisor.remove(name, self._grace_s)
        added = [*failed, *self._free_names(role, failed)[: max(0, num_workers - len(staying))]]
        for name in added:
            await self._supervisor.add(self._make_process(role, _index_of(name)))
        self._remove(removed)
        return ScaleResponse(added=added, removed=removed)

    def _has_failed(self, name: str) -> bool:
        return self._supervisor.life(name).state == "failed"

    def _free_names(self, role: str, but: Sequence[str]) -> list[str]:
        """Lowest first. The name of a worker that is still leaving is not free."""
        taken = {*self._supervisor.names, *but}
        names = (f"{role}-{index}" for index in range(2 * MAX_WORKERS))
        return [name for name in names if name not in taken]

    def _least_wanted(self, names: list[str]) -> list[str]:
        def wanted(name: str) -> tuple[bool, int]:
            return not self._has_failed(name), -_index_of(name)

        return sorted(names, key=wanted)

    def _check_may_leave(self, response: DrainResponse, *, force: bool) -> None:
        worker = response.worker
        if self._supervisor.life(worker.name).state == "draining":
            raise InvalidRequest(f"{worker.name} is leaving already", field="name")
        is_of_no_use = worker.state == pool_service_pb2.POOL_WORKER_STATE_FAILED
        if not response.num_others and not force and not is_of_no_use:
            raise last_of_role(_role_of(worker.name), worker.name)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            task = asyncio.create_task(self._supervisor.remove(name, self._grace_s), name=f"remove {name}")
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)


def _serves_beside(worker: PoolWorker, other: PoolWorker) -> bool:
    is_another = other.role == worker.role and other.name != worker.name
    return is_another and other.state == pool_service_pb2.POOL_WORKER_STATE_SERVING


def _role_of(name: str) -> str:
    return name.rpartition("-")[0]


def _index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def _by_role_and_index(worker: PoolWorker) -> tuple[str, int]:
    """decode-2 before decode-10."""
    role, _, index = worker.name.rpartition("-")
    return (role, int(index)) if index.isdecimal() else (worker.name, 0)
