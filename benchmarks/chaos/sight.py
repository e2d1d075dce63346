"""What each router sees, asked all the time over a channel that stays.

Owns one asker per router. A router that is stopped or dead has no sight; nothing is kept for it but when it
ceased to see something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc.aio

from baton.rpc import open_channel
from baton.v1.admin_service_pb2 import GetClusterStatusRequest, GetClusterStatusResponse, WorkerStatus
from baton.v1.admin_service_pb2_grpc import AdminServiceStub

if TYPE_CHECKING:
    from baton.v1.admin_service_pb2_grpc import AdminServiceAsyncStub

# A worker is the edge from it to itself, a pair that of prefill to decode worker.
Edge = tuple[str, str]
PERIOD_S = 0.04
_ANSWER_S = 0.5


class Sight:
    """`async with Sight({"router-0": admin address}) as sight`."""

    def __init__(self, admin_addresses: Mapping[str, str]) -> None:
        self._admin_addresses = dict(admin_addresses)
        self._seen: dict[str, tuple[float, GetClusterStatusResponse]] = {}
        self._losses: list[tuple[float, str, Edge]] = []
        self._askers: list[asyncio.Task[None]] = []
        self._channels = AsyncExitStack()

    def ready(self, router: str) -> dict[str, WorkerStatus]:
        """The workers that a router can use, by name; none while it does not answer."""
        workers = self._seen[router][1].workers if router in self._seen else ()
        return {worker.name: worker for worker in workers if worker.state == "ready"}

    def num_requests(self, router: str) -> int:
        """Requests that a router has; none while it does not answer."""
        return self._seen[router][1].num_requests if router in self._seen else 0

    def is_since(self, router: str, moment: float) -> bool:
        """Whether the router has been asked after this moment on the loop's clock, and has answered."""
        return router in self._seen and self._seen[router][0] > moment

    def lost_at(self, edge: Edge, routers: Collection[str], since: float) -> float | None:
        """When one of these routers first said, after this moment, that it has lost what it had.

        Another process of the same name is a loss, too. Exact to PERIOD_S.
        """
        found = (at for at, router, lost in self._losses if lost == edge and router in routers)
        return min((at for at in found if at > since), default=None)

    async def __aenter__(self) -> Self:
        for router, address in self._admin_addresses.items():
            channel = await self._channels.enter_async_context(open_channel(address))
            stub = AdminServiceStub(channel)
            self._askers.append(asyncio.create_task(self._ask_on(router, stub), name=f"sight {router}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for asker in self._askers:
            asker.cancel()
        if self._askers:
            await asyncio.wait(self._askers)
        await self._channels.aclose()

    async def _ask_on(self, router: str, stub: AdminServiceAsyncStub) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            asked_at = clock()
            try:
                status = await stub.GetClusterStatus(GetClusterStatusRequest(), timeout=_ANSWER_S)
            except grpc.aio.AioRpcError:
                self._seen.pop(router, None)
            else:
                if router in self._seen:
                    before, now = _usable(self._seen[router][1]), _usable(status)
                    lost = [edge for edge, pid in before.items() if now.get(edge) != pid]
                    self._losses += [(clock(), router, edge) for edge in lost]
                self._seen[router] = asked_at, status
            await asyncio.sleep(PERIOD_S)


def _usable(status: GetClusterStatusResponse) -> dict[Edge, int]:
    """What a router can use, and the process at its beginning."""
    ready = [worker for worker in status.workers if worker.state == "ready"]
    pairs = {(w.name, pair.worker): w.pid for w in ready for pair in w.pairs if pair.transport}
    return {(worker.name, worker.name): worker.pid for worker in ready} | pairs
