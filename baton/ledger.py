"""The admin service of every process: what it holds for requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.errors import InvalidRequest
from baton.v1 import admin_service_pb2, common_pb2
from baton.v1.admin_service_pb2_grpc import AdminServiceServicer


class LedgerServicer(AdminServiceServicer):
    """Answers for one process.

    counts: everything held for requests, by kind; equal dumps of an idle process mean no leak.
    totals: counts since the start, which only grow.
    """

    def __init__(
        self,
        name: str,
        role: common_pb2.Role.ValueType,
        counts: Callable[[], Mapping[str, int]],
        totals: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._name = name
        self._role = role
        self._counts = counts
        self._totals = totals

    async def GetLedger(  # noqa: N802 - gRPC name
        self, request: admin_service_pb2.GetLedgerRequest, context: object
    ) -> admin_service_pb2.GetLedgerResponse:
        """Everything this process holds for requests, and what it has counted."""
        del request, context
        return admin_service_pb2.GetLedgerResponse(
            name=self._name, role=self._role, counts=self._counts(), totals=self._totals()
        )

    async def GetClusterStatus(  # noqa: N802 - gRPC name
        self, request: admin_service_pb2.GetClusterStatusRequest, context: object
    ) -> admin_service_pb2.GetClusterStatusResponse:
        """Only a router knows the cluster."""
        del request, context
        raise InvalidRequest(f"{self._name} is a worker; ask a router's admin port for the cluster's status")

    async def GetRouteExplain(  # noqa: N802 - gRPC name
        self, request: admin_service_pb2.GetRouteExplainRequest, context: object
    ) -> admin_service_pb2.GetRouteExplainResponse:
        """Only a router knows where requests go."""
        del request, context
        raise InvalidRequest(f"{self._name} is a worker; ask a router's admin port where a request went")
