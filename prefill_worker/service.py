"""gRPC services of a prefill worker: sessions and the ledger."""

from __future__ import annotations

from typing import Any

from baton.sessions import serving_session
from baton.v1 import admin_service_pb2, common_pb2
from baton.v1.admin_service_pb2_grpc import AdminServiceServicer
from baton.v1.prefill_service_pb2_grpc import PrefillServiceServicer
from prefill_worker.worker import PrefillWorker


class PrefillServicer(PrefillServiceServicer):
    """Hands each stream to the worker as a session."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Session(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 - gRPC name
        """One router's session."""
        async with serving_session(request_iterator, context) as session:
            await self._worker.serve(session)


class PrefillAdminServicer(AdminServiceServicer):
    """The worker's ledger."""

    def __init__(self, name: str, worker: PrefillWorker) -> None:
        self._name = name
        self._worker = worker

    async def GetLedger(  # noqa: N802 - gRPC name
        self, request: admin_service_pb2.GetLedgerRequest, context: object
    ) -> admin_service_pb2.GetLedgerResponse:
        """Everything this worker holds for requests."""
        del request, context
        return admin_service_pb2.GetLedgerResponse(
            name=self._name, role=common_pb2.ROLE_PREFILL, counts=self._worker.ledger()
        )
