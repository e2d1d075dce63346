"""The public gRPC service: a door to router/inference.py."""

from __future__ import annotations

import grpc

from baton.v1 import inference_service_pb2
from baton.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from baton.v1.inference_service_pb2_grpc import InferenceServiceServicer
from router.inference import Inference
from router.known_fields import check_known
from router.tenancy.tenants import Metadata

Context = grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]

# Of a request that names none.
DEFAULT_MAX_TOKENS = 128


class InferenceServicer(InferenceServiceServicer):
    """Serves one model over gRPC. baton/rpc_server.py turns the errors into statuses."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    # A coroutine that writes, not a generator, so that each write has its timeout.
    async def Generate(  # type: ignore[override]  # noqa: N802 - gRPC name
        self, request: GenerateRequest, context: Context
    ) -> None:
        """Streams the answers. The call's deadline is the request's; a cancelled call cancels it."""
        check_known(request)
        await self._inference.generate(request, _RpcCall(context))

    async def ListModels(  # noqa: N802 - gRPC name
        self, request: inference_service_pb2.ListModelsRequest, context: Context
    ) -> inference_service_pb2.ListModelsResponse:
        """The one model served; raises Unauthenticated like Generate."""
        del request
        models = self._inference.models(context.invocation_metadata() or ())
        return inference_service_pb2.ListModelsResponse(models=models)


class _RpcCall:
    """A gRPC call as router.inference.Call."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.metadata: Metadata = context.invocation_metadata() or ()
        self.traceparent = next((str(v) for k, v in self.metadata if k == "traceparent"), "")
        self.remaining_s: float | None = context.time_remaining()
        self.default_max_tokens = DEFAULT_MAX_TOKENS

    async def write(self, response: GenerateResponse) -> None:
        """Sends one message; waits while the reader is behind."""
        await self._context.write(response)
