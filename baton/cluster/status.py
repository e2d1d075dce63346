"""Asks a router how its cluster is: the admin port's one question, and errors in words."""

from __future__ import annotations

import grpc
import grpc.aio

from baton.errors import Unavailable
from baton.rpc import open_channel, translate
from baton.v1 import admin_service_pb2
from baton.v1.admin_service_pb2_grpc import AdminServiceStub

DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"


async def fetch_status(
    address: str = DEFAULT_ADMIN_ADDRESS, *, timeout_s: float = 5.0
) -> admin_service_pb2.GetClusterStatusResponse:
    """The cluster as the router with this admin address sees it.

    Raises Unavailable, with a remedy, when nothing answers within timeout_s seconds.
    """
    async with open_channel(address) as channel:
        stub = AdminServiceStub(channel)
        try:
            response: admin_service_pb2.GetClusterStatusResponse = await stub.GetClusterStatus(
                admin_service_pb2.GetClusterStatusRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise Unavailable(
                    f"no router's admin port answers at {address}; is it running? "
                    "`baton up` starts a local cluster, --address names another one"
                ) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Unavailable(
                    f"{address} is not a router's admin port; by default that is {DEFAULT_ADMIN_ADDRESS}"
                ) from None
            raise translate(error) from None
    return response
