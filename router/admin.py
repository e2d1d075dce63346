"""The router's admin service: its ledger and its view of the cluster."""

from __future__ import annotations

from baton import __version__
from baton.errors import UnknownRequest
from baton.ledger import LedgerServicer
from baton.v1 import admin_service_pb2, common_pb2
from router.core import RouterCore
from router.decode_link import DecodeLink
from router.explanations import MAX_ENDED
from router.inference import Inference
from router.prefill_link import PrefillLink
from router.service import DEFAULT_MAX_TOKENS


class RouterAdminServicer(LedgerServicer):
    """Answers operators' questions about one router."""

    def __init__(
        self,
        *,
        core: RouterCore,
        model: str,
        inference: Inference,
    ) -> None:
        super().__init__(core.config.name, common_pb2.ROLE_ROUTER, self._held)
        self._config = core.config
        self._model = model
        self._queue = core.queue
        self._fleet = core.fleet
        self._inference = inference
        self._outlook = core.outlook
        self._explanations = core.explanations

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
            workers=[link.status() for link in self._fleet.shown_links],
            buckets=buckets,
            num_requests=self._inference.num_requests,
            dashboard_url=self._config.dashboard_url,
            routing=self._routing(),
            release=__version__,
        )

    async def GetRouteExplain(  # noqa: N802 - gRPC name
        self, request: admin_service_pb2.GetRouteExplainRequest, context: object
    ) -> admin_service_pb2.GetRouteExplainResponse:
        """Where a request went and why; raises NotFound."""
        del context
        answers = self._explanations.find(request.request_id)
        if not answers:
            which = (
                f"no request {request.request_id!r}" if request.request_id else "no request that has ended"
            )
            raise UnknownRequest(
                f"{which} is known to {self._config.name}; a router keeps only its own, and of those that "
                f"ended the last {MAX_ENDED}",
                field="request_id",
            )
        return admin_service_pb2.GetRouteExplainResponse(answers=[answer.report() for answer in answers])

    def _routing(self) -> admin_service_pb2.RoutingStatus:
        costs, metrics, lengths = self._outlook.costs, self._outlook.metrics, self._outlook.lengths
        most = self._config.default_max_tokens or DEFAULT_MAX_TOKENS
        return admin_service_pb2.RoutingStatus(
            placement=self._config.placement,
            prefill_error_p90=costs.error_p90("prefill"),
            step_error_p90=costs.error_p90("step"),
            transfer_error_p90=costs.error_p90("transfer"),
            num_remote=metrics.num_placed["remote"],
            num_local=metrics.num_placed["local"],
            mean_regret_ms=metrics.mean_regret_ms,
            num_shed=metrics.num_shed,
            num_prefix_keys=self._outlook.prefixes.num_keys,
            expected_output_tokens=0 if lengths is None else lengths.expected(most),
        )
