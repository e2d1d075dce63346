"""The router's admin service: its ledger and its view of the cluster."""

from __future__ import annotations

from baton.ledger import LedgerServicer
from baton.v1 import admin_service_pb2, common_pb2
from router.buckets import BucketQueue
from router.config import RouterConfig
from router.decode_link import DecodeLink
from router.dispatcher import Ticket
from router.fleet import Fleet
from router.prefill_link import PrefillLink
from router.service import InferenceServicer


class RouterAdminServicer(LedgerServicer):
    """Answers operators' questions about one router."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        model: str,
        queue: BucketQueue[Ticket],
        fleet: Fleet,
        inference: InferenceServicer,
    ) -> None:
        super().__init__(config.name, common_pb2.ROLE_ROUTER, self._held)
        self._config = config
        self._model = model
        self._queue = queue
        self._fleet = fleet
        self._inference = inference

    def _held(self) -> dict[str, int]:
        links = self._fleet.links
        return {
            "requests": self._inference.num_requests,
            "queued": len(self._queue),
            "attempts": sum(link.num_attempts for link in links),
            "reservations": sum(link.num_asked for link in links if isinstance(link, DecodeLink)),
            "credit_spent_tokens": sum(link.spent for link in links if isinstance(link, PrefillLink)),
        }

    async def GetClusterStatus(  # noqa: N802 - gRPC name
        self, request: admin_service_pb2.GetClusterStatusRequest, context: object
    ) -> admin_service_pb2.GetClusterStatusResponse:
        """Workers, buckets and requests as this router sees them."""
        del request, context
        buckets = [
            admin_service_pb2.BucketStatus(
                label=label,
                num_waiting=self._queue.num_waiting(index),
                num_waiting_tokens=self._queue.num_waiting_tokens(index),
                num_dispatched=self._queue.num_dispatched[index],
            )
            for index, label in enumerate(self._queue.labels)
        ]
        return admin_service_pb2.GetClusterStatusResponse(
            router=self._config.name,
            model=self._model,
            workers=[link.status() for link in self._fleet.links],
            buckets=buckets,
            num_requests=self._inference.num_requests,
            dashboard_url=self._config.dashboard_url,
        )
