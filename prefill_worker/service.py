"""The gRPC service of a prefill worker: sessions."""

from __future__ import annotations

from typing import Any

from baton.sessions import serving_session
from baton.v1.prefill_service_pb2_grpc import PrefillServiceServicer
from prefill_worker.worker import PrefillWorker


class PrefillServicer(PrefillServiceServicer):
    """Hands each stream to the worker as a session."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    # A coroutine that writes, not a generator: the session owns its writer.
    async def Session(  # type: ignore[override]  # noqa: N802 - gRPC name
        self, request_iterator: Any, context: Any
    ) -> None:
        """One router's session."""
        async with serving_session(request_iterator, context) as session:
            await self._worker.serve(session)
