"""The endpoints that generate nothing: models, tokens, and the pages that operators and their tools read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from baton import __version__
from baton.errors import UnknownModel
from baton.v1.inference_service_pb2 import Model
from router.fleet import Fleet
from router.http.exchange import Exchange
from router.inference import Inference


class Pages:
    """GET.

    started_at: seconds since 1970.
    is_draining: whether the router is about to leave.
    """

    def __init__(
        self,
        inference: Inference,
        fleet: Fleet,
        *,
        started_at: int,
        registry: CollectorRegistry,
        is_draining: Callable[[], bool],
    ) -> None:
        self._inference = inference
        self._fleet = fleet
        self._started_at = started_at
        self._registry = registry
        self._is_draining = is_draining

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        models = self._inference.models(exchange.metadata)
        await exchange.reply({"object": "list", "data": [self._model(model) for model in models]})

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{name}."""
        name = exchange.path_params["name"]
        models = self._inference.models(exchange.metadata)
        found = next((model for model in models if model.name == name), None)
        if found is None:
            served = ", ".join(repr(model.name) for model in models)
            raise UnknownModel(
                f"model {name[:64]!r} is not served here; this cluster serves {served}", field="model"
            )
        await exchange.reply(self._model(found))

    async def health(self, exchange: Exchange) -> None:
        """GET /health: the process lives, and its event loop turns."""
        await exchange.reply({"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        """GET /ready: whether a request would be served now, and why not."""
        reason = "this router is about to leave" if self._is_draining() else ""
        if not reason and not self._fleet.is_complete:
            reason = self._fleet.shortage
        if reason:
            content = {"status": "not ready", "reason": reason}
            await exchange.reply(content, status=503, headers={"retry-after": "1"})
            return
        await exchange.reply({"status": "ready"})

    async def version(self, exchange: Exchange) -> None:
        """GET /version."""
        self._inference.check_key(exchange.metadata)
        await exchange.reply({"version": __version__})

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics: what the process counts, as Prometheus reads it."""
        self._inference.check_key(exchange.metadata)
        text = generate_latest(self._registry).decode()
        await exchange.reply(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _model(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }
