"""A long prefill is silent: the SDK's pings keep the connection, and our server takes them (case B44)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from baton import AsyncClient, Retry
from baton.errors import Unavailable
from baton.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from tests.baton.scripted_router import Scripted, serving, three_chunks

# Nine of the SDK's pings, which come each second; a server with gRPC's defaults closes at the third.
SILENT_S = 9.0


async def silent(server: Scripted, context: Any) -> None:
    await asyncio.sleep(SILENT_S)
    await three_chunks(server, context)


async def through_our_server() -> str:
    async with serving(silent) as (_, server), await AsyncClient.connect(server.address) as client:
        return await client.generate("hello").text()


async def after_an_idle_time() -> str:
    once = Retry(max_attempts=1)
    async with serving() as (_, server), await AsyncClient.connect(server.address, retry=once) as client:
        await asyncio.sleep(SILENT_S)
        return await client.generate("hello").text()


async def through_a_server_with_grpcs_defaults() -> str:
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(Scripted(silent), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        once = Retry(max_attempts=1)
        async with await AsyncClient.connect(f"127.0.0.1:{port}", retry=once) as client:
            return await client.generate("hello").text()
    finally:
        await server.stop(None)


async def test_nine_silent_seconds_are_survived_and_would_not_be_everywhere() -> None:
    async with asyncio.TaskGroup() as group:
        ours = group.create_task(through_our_server())
        idle = group.create_task(after_an_idle_time())
        other = group.create_task(asyncio.wait_for(refused(), 2 * SILENT_S))
    assert ours.result() == "one two"
    assert idle.result() == "one two"
    assert "ping" in other.result().lower()


async def refused() -> str:
    with pytest.raises(Unavailable) as error:
        await through_a_server_with_grpcs_defaults()
    return error.value.message
