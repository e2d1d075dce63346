"""Asks a router's admin port how its cluster is and where a request went; errors in words."""

from __future__ import annotations

import grpc
import grpc.aio

from baton.cluster.defaults import DEFAULT_ADMIN_ADDRESS
from baton.errors import BatonError, Unavailable, UnknownRequest
from baton.rpc import OpenChannel, open_channel, translate
from baton.tls import TLS_SETTINGS
from baton.v1 import admin_service_pb2
from baton.v1.admin_service_pb2_grpc import AdminServiceStub


async def fetch_status(
    address: str = DEFAULT_ADMIN_ADDRESS, *, timeout_s: float = 5.0, opener: OpenChannel = open_channel
) -> admin_service_pb2.GetClusterStatusResponse:
    """The cluster as the router with this admin address sees it.

    opener: opens the channel; TlsFiles.opener() for a cluster with TLS.

    Raises Unavailable, with a remedy, when nothing answers within timeout_s seconds; its field names a
    setting of TLS when the two ends do not agree on that.
    """
    async with opener(address) as channel:
        stub = AdminServiceStub(channel)
        try:
            response: admin_service_pb2.GetClusterStatusResponse = await stub.GetClusterStatus(
                admin_service_pb2.GetClusterStatusRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise _explained(error, address) from None
    return response


async def fetch_explain(
    request_id: str = "",
    address: str = DEFAULT_ADMIN_ADDRESS,
    *,
    timeout_s: float = 5.0,
    opener: OpenChannel = open_channel,
) -> admin_service_pb2.GetRouteExplainResponse:
    """Where a request went, by the router with this admin address.

    request_id: "" means the request that ended last.

    Raises UnknownRequest, with a remedy, for a request the router does not know; else as fetch_status.
    """
    async with opener(address) as channel:
        stub = AdminServiceStub(channel)
        try:
            response: admin_service_pb2.GetRouteExplainResponse = await stub.GetRouteExplain(
                admin_service_pb2.GetRouteExplainRequest(request_id=request_id), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                remedy = "another router may have had it: --address names its admin port"
                raise UnknownRequest(f"{translate(error).message}; {remedy}", field="request_id") from None
            raise _explained(error, address) from None
    return response


def _explained(error: grpc.aio.AioRpcError, address: str) -> BatonError:
    failure = translate(error)
    if failure.field in TLS_SETTINGS:
        return Unavailable(f"the admin port at {address}: {failure.message}", field=failure.field)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(
            f"no router's admin port answers at {address}; is it running? "
            "`baton up` starts a local cluster, --address names another one"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(
            f"{address} is not a router's admin port; by default that is {DEFAULT_ADMIN_ADDRESS}"
        )
    return failure
