"""PoolService of a local cluster: turns requests into calls of its fleet, and back.

Owns nothing; the fleet decides.
"""

from __future__ import annotations

from functools import partial

import grpc

from baton.cluster.fleet import Fleet
from baton.rpc_server import Registration, RpcServer
from baton.v1.pool_service_pb2 import (
    DrainRequest,
    DrainResponse,
    ListWorkersRequest,
    ListWorkersResponse,
    ScaleRequest,
    ScaleResponse,
)
from baton.v1.pool_service_pb2_grpc import PoolServiceServicer, add_PoolServiceServicer_to_server

NAME = "baton.v1.PoolService"


class ControlService(PoolServiceServicer):
    """What `baton workers`, `baton scale` and `baton drain` talk to."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @classmethod
    async def serve(
        cls, fleet: Fleet, *, port: int, credentials: grpc.ServerCredentials | None = None
    ) -> RpcServer:
        """Listens on loopback; raises ConfigError if the port is taken."""
        registration = Registration(name=NAME, add=partial(add_PoolServiceServicer_to_server, cls(fleet)))
        server = await RpcServer.start([registration], port=port, credentials=credentials)
        await server.set_health(ready=True)
        return server

    async def ListWorkers(  # noqa: N802 - gRPC name
        self, request: ListWorkersRequest, context: object
    ) -> ListWorkersResponse:
        """All workers of the cluster, whoever runs them."""
        del request, context
        return await self._fleet.list_workers()

    async def Scale(self, request: ScaleRequest, context: object) -> ScaleResponse:  # noqa: N802 - gRPC name
        """Adds workers, or drains and removes some; raises InvalidRequest."""
        del context
        return await self._fleet.scale(request.role, request.num_workers)

    async def Drain(self, request: DrainRequest, context: object) -> DrainResponse:  # noqa: N802 - gRPC name
        """Drains and removes one worker, or says what that would mean; raises InvalidRequest."""
        del context
        return await self._fleet.drain(request.name, dry_run=request.dry_run, force=request.force)
