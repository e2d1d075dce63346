"""Opens sessions with workers over gRPC: the production side of the Dialer port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import grpc

from baton.ports import Session, WorkerInfo
from baton.rpc import OpenChannel, open_channel
from baton.sessions import StreamSession
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from baton.v1.decode_service_pb2_grpc import DecodeServiceStub
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest, PrefillServiceSessionResponse
from baton.v1.prefill_service_pb2_grpc import PrefillServiceStub

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")


class GrpcDialer(Generic[SendT, RecvT]):
    """A Dialer that opens a channel of its own for each session.

    opener: opens the channels.
    start: begins the role's streaming call on a channel.
    """

    def __init__(
        self,
        opener: OpenChannel,
        start: Callable[[grpc.aio.Channel], grpc.aio.StreamStreamCall[SendT, RecvT]],
    ) -> None:
        self._opener = opener
        self._start = start

    @asynccontextmanager
    async def open(self, info: WorkerInfo) -> AsyncIterator[Session[SendT, RecvT]]:
        """A session with a worker, ended when the block is left; a lost worker shows on its first use."""
        async with self._opener(info.address) as channel:
            call = self._start(channel)
            async with StreamSession(info.name, aiter(call), call.write, call.cancel) as session:
                yield session


def prefill_dialer(
    opener: OpenChannel = open_channel,
) -> GrpcDialer[PrefillServiceSessionRequest, PrefillServiceSessionResponse]:
    """Dials prefill workers."""
    return GrpcDialer(opener, lambda channel: PrefillServiceStub(channel).Session())


def decode_dialer(
    opener: OpenChannel = open_channel,
) -> GrpcDialer[DecodeServiceSessionRequest, DecodeServiceSessionResponse]:
    """Dials decode workers."""
    return GrpcDialer(opener, lambda channel: DecodeServiceStub(channel).Session())
