"""The cases of gRPC's own interoperability tests that concern a client like this one, under their names.

doc/interop-test-descriptions.md of grpc/grpc describes them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton import AsyncClient, Retry
from baton.errors import Cancelled, DeadlineExceeded, IncompatiblePeer, InternalError
from baton.rpc_server import RpcServer
from tests.baton.scripted_router import GUARD_S, Answer, one_chunk_and_no_end, serving, three_chunks

ONCE = Retry(max_attempts=1)
KEY = "0123456789abcdef"


def saying(message: str) -> Answer:
    async def answer(server: Any, context: Any) -> None:
        raise InternalError(message)

    return answer


async def test_cancel_after_begin() -> None:
    async with (
        serving(one_chunk_and_no_end) as (_, server),
        await AsyncClient.connect(server.address) as client,
    ):
        generation = client.generate("hello")
        generation.cancel()
        with pytest.raises(Cancelled):
            await generation.text()


async def test_cancel_after_first_response() -> None:
    async with (
        serving(one_chunk_and_no_end) as (scripted, server),
        await AsyncClient.connect(server.address) as client,
    ):
        generation = client.generate("hello")
        chunks = aiter(generation)
        assert (await anext(chunks)).text == "one"
        generation.cancel()
        with pytest.raises(Cancelled):
            await anext(chunks)
        assert await asyncio.to_thread(scripted.cancelled.wait, GUARD_S)


async def test_timeout_on_sleeping_server() -> None:
    async with (
        serving(one_chunk_and_no_end) as (_, server),
        await AsyncClient.connect(server.address) as client,
    ):
        with pytest.raises(DeadlineExceeded):
            await client.generate("hello", timeout_s=0.001).text()


@pytest.mark.parametrize(
    "message",
    ["test status message", "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"],
    ids=["status_code_and_message", "special_status_message"],
)
async def test_status_message(message: str) -> None:
    async with (
        serving(saying(message)) as (_, server),
        await AsyncClient.connect(server.address, retry=ONCE) as client,
    ):
        with pytest.raises(InternalError) as error:
            await client.generate("hello").text()
        assert (error.value.message, error.value.code) == (message, "INTERNAL")


async def test_custom_metadata() -> None:
    async with (
        serving(three_chunks) as (scripted, server),
        await AsyncClient.connect(server.address, api_key=KEY) as client,
    ):
        await client.generate("hello").text()
        await client.list_models()
        assert [said["authorization"] for said in scripted.metadata] == [f"Bearer {KEY}"] * 2


async def test_unimplemented_service() -> None:
    async with (
        await RpcServer.start([]) as server,
        await AsyncClient.connect(server.address) as client,
        asyncio.timeout(GUARD_S),
    ):
        for call in (client.generate("hello").text(), client.list_models()):
            with pytest.raises(IncompatiblePeer, match="is it a router's public port, of this version"):
                await call
