"""Each bound of both doors: as much as may be is taken, and one more is refused, by name.

What is bounded in time has its tests elsewhere; docs/security.md names them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from baton import rpc_server
from baton.errors import BatonError, InvalidRequest
from baton.rpc import MAX_MESSAGE_BYTES, open_channel, translate
from baton.v1.inference_service_pb2 import GenerateRequest
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub
from router.config import RouterConfig
from router.http import connection, server
from router.http.doorman import ID_HEADER, MAX_HEADER_BYTES
from router.http.exchange import MAX_BODY_BYTES
from router.request import MAX_REQUEST_ID_CHARS
from tests.router.http.door import Door, door
from tests.router.tiny_text import model_dir
from tests.security.limits import BOUNDS, CONTEXT, TEMPLATE, Bound
from tests.security.test_without_a_key import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Door, str]]:
    """The HTTP door, and the address of the gRPC door, of one cluster in memory."""
    folder = tmp_path_factory.mktemp("limits")
    model = model_dir(folder / "tiny", template=TEMPLATE)
    async with door(folder, model=model) as d, await served(d) as grpc_server:
        yield d, grpc_server.address
        await d.idle()


async def by_http(d: Door, bound: Bound, number: int) -> tuple[int, str, str]:
    """Status, field and message of the answer to a request with so much of it."""
    assert bound.http is not None
    body = bound.http(number)
    answer = await d.http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
    error = answer.json().get("error", {})
    return answer.status_code, error.get("param") or "", error.get("message", "")


async def by_grpc(address: str, request: GenerateRequest) -> BatonError | None:
    """What the request is refused with, if it is."""
    # As a client of another make, which checks nothing.
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        try:
            async for _ in InferenceServiceStub(channel).Generate(request, timeout=20):
                pass
        except grpc.aio.AioRpcError as error:
            return translate(error)
    return None


def names(message: str, bound: Bound) -> bool:
    """Whether a refusal tells that bound."""
    return re.search(rf"\b{bound.most}\b", message) is not None


@pytest.mark.parametrize("bound", [b for b in (*BOUNDS, CONTEXT) if b.http], ids=lambda bound: bound.name)
async def test_over_http_as_much_as_may_be_is_taken_and_one_more_is_not(
    both: tuple[Door, str], bound: Bound
) -> None:
    status, _, message = await by_http(both[0], bound, bound.most)
    assert (status == 200) if bound.served else (status == 400 and not names(message, bound)), message
    status, field, message = await by_http(both[0], bound, bound.most + 1)
    assert (status, field) == (400, bound.field), message
    assert names(message, bound), message


@pytest.mark.parametrize("bound", [b for b in (*BOUNDS, CONTEXT) if b.grpc], ids=lambda bound: bound.name)
async def test_over_grpc_as_much_as_may_be_is_taken_and_one_more_is_not(
    both: tuple[Door, str], bound: Bound
) -> None:
    assert bound.grpc is not None
    error = await by_grpc(both[1], bound.grpc(bound.most))
    assert (error is None) if bound.served else (error is not None and not names(error.message, bound)), error
    error = await by_grpc(both[1], bound.grpc(bound.most + 1))
    assert isinstance(error, InvalidRequest)
    assert error.field == (bound.grpc_field or bound.field)
    assert names(error.message, bound), error.message


async def test_a_message_of_16_mib_is_read_and_a_longer_one_is_not(both: tuple[Door, str]) -> None:
    # The key and the length of its only field.
    around = 1 + 4
    fitting = await by_grpc(both[1], GenerateRequest(text="x" * (MAX_MESSAGE_BYTES - around)))
    assert isinstance(fitting, InvalidRequest)
    assert "this model takes at most" in fitting.message
    error = await by_grpc(both[1], GenerateRequest(text="x" * (MAX_MESSAGE_BYTES - around + 1)))
    assert isinstance(error, InvalidRequest)
    assert f"({MAX_MESSAGE_BYTES + 1} vs. {MAX_MESSAGE_BYTES})" in error.message


async def test_headers_have_a_size_and_a_requests_id_a_length(both: tuple[Door, str]) -> None:
    async def status(headers: dict[str, str]) -> int:
        return (await both[0].http.get("/v1/models", headers=headers)).status_code

    assert await status({"x-y": "x" * (MAX_HEADER_BYTES - 1_000)}) == 200
    assert await status({"x-y": "x" * MAX_HEADER_BYTES}) in (400, 431)
    # Their number is bounded by that too.
    lines = [b"GET /health HTTP/1.1", b"host: x", *[b"x:y"] * (MAX_HEADER_BYTES // len("x: y\r\n")), b"", b""]
    reader, writer = await asyncio.open_connection("127.0.0.1", both[0].server.port)
    writer.write(b"\r\n".join(lines))
    assert (await reader.readline()).split()[1] in (b"400", b"431")
    writer.close()
    assert await status({ID_HEADER: "r" * MAX_REQUEST_ID_CHARS}) == 200
    assert await status({ID_HEADER: "r" * (MAX_REQUEST_ID_CHARS + 1)}) == 400


async def test_metadata_of_a_call_is_refused_by_its_size(both: tuple[Door, str]) -> None:
    async with open_channel(both[1]) as channel:
        call = InferenceServiceStub(channel).Generate(
            GenerateRequest(text="hi"), metadata=[("x-y", "x" * 20_000)], timeout=20
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "metadata" in (caught.value.details() or "")


async def test_the_page_lists_each_bound_with_its_value() -> None:
    config = RouterConfig(model="m")
    others = {
        "bytes of a message or body": MAX_MESSAGE_BYTES,
        "bytes of a request line and its headers": MAX_HEADER_BYTES,
        "calls open at a gRPC server": rpc_server.MAX_CALLS,
        "requests in flight (`max_requests`)": config.max_requests,
        "requests that wait (`max_queue`)": config.max_queue,
        "seconds for a request to arrive": int(connection.REQUEST_S),
        "seconds for a handshake": int(server.HANDSHAKE_S),
        "seconds without a read (`write_timeout_s`)": int(config.write_timeout_s),
        "seconds between two requests of a connection": server.KEEP_ALIVE_S,
    }
    assert MAX_BODY_BYTES == MAX_MESSAGE_BYTES
    wanted = {bound.name: bound.most for bound in BOUNDS} | others
    section = PAGE.partition("## Limits")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \|", section, re.MULTILINE))
    assert {name: int(value.replace(",", "")) for name, value in listed.items()} == wanted
