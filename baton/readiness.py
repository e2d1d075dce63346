"""Asks a public port whether its router takes requests, in gRPC's own protocol for that.

The protocol's package is not part of the base install, and its two messages are a byte string and a number
here: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.rpc import OpenChannel, translate

_METHOD = "/grpc.health.v1.Health/Check"
# A router's other ports have that service too, but not this one.
_PUBLIC_METHOD = "/baton.v1.InferenceService/ListModels"
# HealthCheckRequest{}: the server as a whole. HealthCheckResponse{status: SERVING}: field 1, value 1.
_WHOLE_SERVER = b""
_SERVING = b"\x08\x01"
POLL_S = 0.25
CALL_S = 2.0


async def is_ready(address: str, opener: OpenChannel, *, timeout_s: float = CALL_S) -> bool:
    """Whether it takes requests; raises Unavailable if nothing answers, or somebody else does."""
    async with opener(address) as channel:
        check: Any = channel.unary_unary(_METHOD)
        try:
            answer: bytes = await check(_WHOLE_SERVER, timeout=timeout_s)
            if answer == _SERVING:
                await _check_public(channel, timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _explained(translate(error), address) from None
    return answer == _SERVING


async def _check_public(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Raises the error of a port that does not serve clients; any other answer will do, also a refusal."""
    ask: Any = channel.unary_unary(_PUBLIC_METHOD)
    try:
        await ask(b"", timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise


async def wait_ready(
    address: str, opener: OpenChannel, *, wait_s: float, waiting: Callable[[str], None]
) -> bool:
    """Whether it takes requests, within wait_s seconds; 0 asks once.

    waiting: told why there is something to wait for. Raises Unavailable if nothing answers at the end.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        failure: BatonError | None = None
        try:
            if await is_ready(address, opener):
                return True
        except Unavailable as error:
            failure = error
        if loop.time() >= deadline:
            if failure is not None:
                raise failure
            return False
        waiting("not ready yet" if failure is None else "nothing answers yet")
        await asyncio.sleep(min(POLL_S, max(0.0, deadline - loop.time())))


def _explained(failure: BatonError, address: str) -> BatonError:
    if isinstance(failure, Unavailable) and failure.field:
        return Unavailable(f"the router at {address}: {failure.message}", field=failure.field)
    if isinstance(failure, Unavailable | DeadlineExceeded):
        return Unavailable(
            f"no router answers at {address}; `baton up` starts a local cluster, --address names another one"
        )
    return Unavailable(f"{address} is not a router's public port: {failure.message}")
