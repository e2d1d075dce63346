"""Opens sessions with workers over gRPC: the production side of the Dialer port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.ports import WorkerInfo
from baton.rpc import open_channel
from baton.sessions import StreamSession
from baton.v1.decode_service_pb2 import DecodeServiceSessionRequest, DecodeServiceSessionResponse
from baton.v1.decode_service_pb2_grpc import DecodeServiceStub
from baton.v1.prefill_service_pb2 import PrefillServiceSessionRequest, PrefillServiceSessionResponse
from baton.v1.prefill_service_pb2_grpc import PrefillServiceStub


@asynccontextmanager
async def dial_prefill(
    info: WorkerInfo,
) -> AsyncIterator[StreamSession[PrefillServiceSessionRequest, PrefillServiceSessionResponse]]:
    """A session with a prefill worker, ended when the block is left."""
    async with open_channel(info.address) as channel:
        call = PrefillServiceStub(channel).Session()
        async with StreamSession(info.name, aiter(call), call.write, call.cancel) as session:
            yield session


@asynccontextmanager
async def dial_decode(
    info: WorkerInfo,
) -> AsyncIterator[StreamSession[DecodeServiceSessionRequest, DecodeServiceSessionResponse]]:
    """A session with a decode worker, ended when the block is left."""
    async with open_channel(info.address) as channel:
        call = DecodeServiceStub(channel).Session()
        async with StreamSession(info.name, aiter(call), call.write, call.cancel) as session:
            yield session
