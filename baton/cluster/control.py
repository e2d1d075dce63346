"""Asks whoever places workers, `baton up` or a pool, which there are, for more, or for one to leave."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from baton.cluster.defaults import DEFAULT_CONTROL_ADDRESS
from baton.errors import BatonError, Unavailable
from baton.rpc import OpenChannel, is_from_baton, open_channel, translate
from baton.tls import TLS_SETTINGS
from baton.v1 import common_pb2
from baton.v1.pool_service_pb2 import (
    DrainRequest,
    DrainResponse,
    ListWorkersRequest,
    ListWorkersResponse,
    ScaleRequest,
    ScaleResponse,
)
from baton.v1.pool_service_pb2_grpc import PoolServiceStub

ResponseT = TypeVar("ResponseT")


class ControlClient:
    """A control port. `async with ControlClient(address) as control: await control.list_workers()`

    opener: opens the channel; TlsFiles.opener() for a cluster with TLS.
    timeout_s: how long one question may take, in seconds.

    Every question raises Unavailable, with a remedy, when nothing answers, and what the other end refuses
    with as it said it.
    """

    def __init__(
        self,
        address: str = DEFAULT_CONTROL_ADDRESS,
        *,
        opener: OpenChannel = open_channel,
        timeout_s: float = 10.0,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = opener(address)
        self._stub = PoolServiceStub(self._channel)

    async def list_workers(self) -> ListWorkersResponse:
        """The workers, by name."""
        return await self._asked(self._stub.ListWorkers(ListWorkersRequest(), timeout=self._timeout_s))

    async def scale(self, role: common_pb2.Role.ValueType, num_workers: int) -> ScaleResponse:
        """Sets how many workers of a role there shall be; returns as soon as that is taken down."""
        request = ScaleRequest(role=role, num_workers=num_workers)
        return await self._asked(self._stub.Scale(request, timeout=self._timeout_s))

    async def drain(self, name: str, *, dry_run: bool = False, force: bool = False) -> DrainResponse:
        """Drains a worker and removes it, or only says what would happen; returns as soon as it has begun.

        force: even if it is the last of its role.
        """
        request = DrainRequest(name=name, dry_run=dry_run, force=force)
        return await self._asked(self._stub.Drain(request, timeout=self._timeout_s))

    def _silence(self, *, is_closed: bool) -> Unavailable:
        """What to say when nothing answers. is_closed: the port does not take, or keep, a connection."""
        del is_closed
        return Unavailable(
            f"no control port answers at {self._address}; `baton up` serves one for its cluster, "
            "`python -m baton.pool` for a pool; --address names another one"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def _asked(self, call: Awaitable[ResponseT]) -> ResponseT:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None

    def _explained(self, error: grpc.aio.AioRpcError) -> BatonError:
        failure = translate(error)
        if failure.field in TLS_SETTINGS:
            return Unavailable(f"the control port at {self._address}: {failure.message}", field=failure.field)
        if is_from_baton(error):
            return failure
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return self._silence(is_closed=error.code() is grpc.StatusCode.UNAVAILABLE)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(
                f"{self._address} is not a control port; by default that is {DEFAULT_CONTROL_ADDRESS}"
            )
        return failure
