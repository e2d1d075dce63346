"""The cluster as each of its routers sees it, and what that says about readiness.

Owns no state. Reading a view must not depend on which router gave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from baton.cluster.status import fetch_status
from baton.errors import BatonError, IncompatiblePeer, Unavailable
from baton.rpc import OpenChannel
from baton.v1 import admin_service_pb2, common_pb2

ClusterStatus = admin_service_pb2.GetClusterStatusResponse
Views = Mapping[str, ClusterStatus | None]


class RouterViews:
    """Asks all routers at once.

    admin_addresses: by router.
    """

    def __init__(self, admin_addresses: Mapping[str, str], opener: OpenChannel) -> None:
        self._addresses = admin_addresses
        self._opener = opener

    async def look(self, timeout_s: float = 2.0) -> dict[str, ClusterStatus | None]:
        """The status by router, None of one that does not answer.

        Raises Unavailable if the certificate of this very cluster does not fit its other settings.
        """
        asked = {name: asyncio.create_task(self._ask(name, timeout_s)) for name in self._addresses}
        await asyncio.wait(asked.values())
        return {name: task.result() for name, task in asked.items()}

    async def _ask(self, name: str, timeout_s: float) -> ClusterStatus | None:
        try:
            return await fetch_status(self._addresses[name], timeout_s=timeout_s, opener=self._opener)
        except BatonError as error:
            if error.field in ("tls_ca", "tls_server_name"):
                raise
            return None


def missing(views: Views, workers: Iterable[str]) -> frozenset[str]:
    """The routers that do not answer, and those of the workers that some router cannot use yet.

    Raises Unavailable, with the reason, where waiting does not help.
    """
    silent = {name for name, view in views.items() if view is None}
    seen = [view for view in views.values() if view is not None]
    for view in seen:
        _refuse_hopeless(view)
    usable = [{worker.name for worker in view.workers if _is_usable(worker)} for view in seen]
    everywhere = set.intersection(*usable) if usable else set()
    return frozenset(silent | (set(workers) - everywhere))


def _is_usable(worker: admin_service_pb2.WorkerStatus) -> bool:
    """Whether it is ready and KV can go from it to every decode worker that it knows."""
    is_prefill = worker.role == common_pb2.ROLE_PREFILL
    is_paired = bool(worker.pairs) and all(pair.transport for pair in worker.pairs)
    return worker.state == "ready" and (is_paired or not is_prefill)


def _refuse_hopeless(view: ClusterStatus) -> None:
    for worker in view.workers:
        if worker.state == "refused":
            raise Unavailable(f"{view.router} refused {worker.name}: {worker.reason}")
        for pair in worker.pairs:
            if pair.code == IncompatiblePeer.code:
                raise Unavailable(f"no KV can go from {worker.name} to {pair.worker}: {pair.reason}")
