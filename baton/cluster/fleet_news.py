"""What happens to the workers of a running cluster, in lines for people: a plain core.

Owns what was told last. A plain process' death is the supervisor's to tell; this tells of Ray's, and of
everybody who comes back, comes or goes: workers, routers, and the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.v1 import pool_service_pb2
from baton.v1.pool_service_pb2 import ListWorkersResponse, PoolWorker

_SERVING = pool_service_pb2.POOL_WORKER_STATE_SERVING
_DRAINING = pool_service_pb2.POOL_WORKER_STATE_DRAINING
_UNHEALTHY = pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY
_TROUBLE = {
    pool_service_pb2.POOL_WORKER_STATE_RESTARTING: "is restarting",
    pool_service_pb2.POOL_WORKER_STATE_FAILED: "is given up",
    _UNHEALTHY: "does not serve",
}


class FleetNews:
    """Compares each list of workers with the one before."""

    def __init__(self) -> None:
        self._told: dict[str, PoolWorker] | None = None
        self._serving_pids: dict[str, int] = {}
        self._answering_pids: dict[str, int] = {}
        self._is_ray_silent = False
        self._unknown = ""

    def lines(self, now: ListWorkersResponse, answering: Mapping[str, int] | None = None) -> list[str]:
        """What is new; nothing about the first list.

        answering: process ids of the routers and the pool, of those that answer now.
        """
        self._unknown = ""
        workers = {worker.name: worker for worker in now.workers}
        before, self._told = self._told, workers
        news = [] if before is None else [*_departures(before, workers), *self._changes(before, workers)]
        for worker in workers.values():
            if worker.state == _SERVING:
                self._serving_pids[worker.name] = worker.pid
        self._serving_pids = {name: pid for name, pid in self._serving_pids.items() if name in workers}
        returned = list(self._returns(answering or {}))
        return [*returned, *news, *self._about_ray(silent_ms=now.ray_silent_ms)]

    def unknown(self, reason: str) -> list[str]:
        """The workers cannot be looked at; said once for each reason."""
        before, self._unknown = self._unknown, reason
        return [] if reason == before else [f"no news of the workers: {reason}"]

    def _changes(self, before: dict[str, PoolWorker], workers: dict[str, PoolWorker]) -> Iterator[str]:
        for name, worker in workers.items():
            old = before.get(name)
            if worker.state == _SERVING and self._serving_pids.get(name) != worker.pid:
                yield self._arrival(worker)
            elif worker.state == _SERVING and old is not None and old.state != _SERVING:
                yield f"{name} serves again"
            elif old is None or old.state != worker.state:
                yield from _trouble(worker)

    def _arrival(self, worker: PoolWorker) -> str:
        if worker.name not in self._serving_pids:
            return f"{worker.name} serves (process {worker.pid})"
        return f"{worker.name} is back (process {worker.pid})"

    def _returns(self, answering: Mapping[str, int]) -> Iterator[str]:
        for name, pid in answering.items():
            if self._answering_pids.setdefault(name, pid) != pid:
                self._answering_pids[name] = pid
                yield f"{name} is back (process {pid})"

    def _about_ray(self, *, silent_ms: int) -> Iterator[str]:
        was_silent, self._is_ray_silent = self._is_ray_silent, silent_ms > 0
        if self._is_ray_silent and not was_silent:
            yield "Ray's control service does not answer: workers go on, but none is started"
        elif was_silent and not self._is_ray_silent:
            yield "Ray's control service answers again"


def _departures(before: dict[str, PoolWorker], workers: dict[str, PoolWorker]) -> Iterator[str]:
    for name in before:
        if name not in workers:
            yield f"{name} has left"


def _trouble(worker: PoolWorker) -> Iterator[str]:
    reason = f": {worker.reason}" if worker.reason else ""
    if worker.state == _DRAINING:
        yield f"{worker.name} drains"
    elif worker.state in _TROUBLE and (worker.runner == "ray" or worker.state == _UNHEALTHY):
        yield f"{worker.name} {_TROUBLE[worker.state]}{reason}"
