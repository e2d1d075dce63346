"""What a request must not decide: whom the cluster dials, and what stands in the head of its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor

from baton.rpc import open_channel
from baton.v1 import inference_service_pb2
from baton.v1.inference_service_pb2 import GenerateRequest
from baton.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.router.http.door import Door, door
from tests.security.openapi import BODIES
from tests.security.test_without_a_key import served

# By which other servers are told where KV is, or whom to ask; and addresses that nobody should dial.
ADDRESS_FIELDS = (
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "prefill_url",
    "decode_url",
    "remote_host",
    "worker",
    "worker_id",
    "nvext",
)
ADDRESS_HEADERS = (
    "x-prefiller-host-port",
    "x-data-parallel-host-port",
    "x-gateway-destination-endpoint",
    "x-worker-instance-id",
    "x-forwarded-host",
    "x-original-url",
)
PLACES = (
    "http://169.254.169.254/latest/meta-data/",
    "[::]:80",
    "localhost.localdomain",
    "file:///etc/passwd",
)
# Of an answer's head; what else stood there a client would have put there.
HEADERS = {
    "content-length",
    "content-type",
    "x-request-id",
    "date",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "transfer-encoding",
    "cache-control",
    "connection",
    "allow",
    "x-accel-buffering",
}


@asynccontextmanager
async def trap() -> AsyncIterator[tuple[str, list[str]]]:
    """An address that nobody has a reason to dial, and who did."""
    dialled: list[str] = []

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append("connection")
        writer.close()

    server = await asyncio.start_server(taken, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}", dialled


async def test_no_field_or_header_says_whom_to_dial(tmp_path: Path) -> None:
    async with trap() as (address, dialled), door(tmp_path) as d, await served(d) as server:
        for field in ADDRESS_FIELDS:
            answer = await d.complete(prompt="hi", max_tokens=1, **{field: address})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        for place in (address, f"http://{address}/", *PLACES):
            headers = dict.fromkeys(ADDRESS_HEADERS, place)
            body = {"prompt": "hi", "max_tokens": 1}
            answer = await d.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            part = {"type": "image_url", "image_url": {"url": place}}
            answer = await d.chat(messages=[{"role": "user", "content": [part]}])
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0]")
            async with open_channel(server.address) as channel:
                call = InferenceServiceStub(channel).Generate(
                    GenerateRequest(text="hi", max_tokens=1), metadata=[*headers.items()], timeout=20
                )
                assert [answer async for answer in call][-1].HasField("summary")
        await d.idle()
        assert set(d.cluster.stage.dialer.sessions) <= set(d.cluster.stage.dialer.workers)
        assert dialled == []


def fields(message: Descriptor, seen: set[str]) -> Iterator[str]:
    """Names of all fields of a message and of those in it."""
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field.name
        if field.message_type is not None:
            yield from fields(field.message_type, seen)


def test_no_field_of_either_doors_requests_has_room_for_an_address() -> None:
    address = re.compile(r"host|port\b|addr|url|uri|endpoint|peer|worker|bootstrap|remote|socket|path")
    service = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    by_grpc = {name for method in service.methods for name in fields(method.input_type, set())}
    assert "token_ids" in by_grpc
    assert [name for name in by_grpc if address.search(name)] == []
    by_http = {field.alias or name for body in BODIES.values() for name, field in body.model_fields.items()}
    assert "prompt" in by_http
    assert [name for name in by_http if address.search(name)] == []


INJECTED = "\r\nset-cookie: a=b\r\n\r\n<script>"


async def raw(d: Door, *lines: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", d.server.port)
    writer.write(b"\r\n".join([*lines, b"host: x", b"connection: close", b"", b""]))
    async with asyncio.timeout(20):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head, body


def names_of(head: bytes) -> set[str]:
    return {line.partition(b":")[0].decode().lower() for line in head.split(b"\r\n")[1:]}


@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r", b"%0d%0a", b"\\r\\n", b"\x00", b"\x0b", "é".encode()])
async def test_nothing_that_is_echoed_makes_a_header(tmp_path: Path, end: bytes) -> None:
    cookie = end + b"set-cookie: a=b"
    async with door(tmp_path) as d:
        for lines in (
            [b"GET /v1/models HTTP/1.1", b"x-request-id: r" + cookie],
            [b"GET /v1/models/tiny" + cookie + b" HTTP/1.1"],
            [b"GET /nowhere?" + cookie + b" HTTP/1.1"],
            [b"GET" + cookie + b" /health HTTP/1.1"],
            [b"GET /v1/models HTTP/1.1", b"traceparent: 00" + cookie],
        ):
            head, _ = await raw(d, *lines)
            assert names_of(head) <= HEADERS, (lines, head)


async def test_a_requests_id_in_a_body_or_a_call_makes_none_either(tmp_path: Path) -> None:
    async with door(tmp_path) as d, await served(d) as server:
        for body in (
            {"model": INJECTED},
            {INJECTED: 1},
            {"user": INJECTED},
            {"prompt": INJECTED, "stop": [""]},
        ):
            answer = await d.complete(**{"prompt": "hi", "max_tokens": 1, **body})
            assert set(answer.headers) <= HEADERS
            assert answer.headers["content-type"] == "application/json"
        async with open_channel(server.address) as channel:
            for request in (GenerateRequest(text="hi", request_id=INJECTED), GenerateRequest(model=INJECTED)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await InferenceServiceStub(channel).Generate(request, timeout=20).read()
                trailers: dict[str, Any] = dict(caught.value.trailing_metadata() or ())
                assert not any("cookie" in name for name in trailers)
                assert "\n" not in "".join(map(str, trailers.values()))


@pytest.mark.parametrize(
    "lines",
    [
        [b"POST /v1/completions HTTP/1.1", b"content-length: 5", b"transfer-encoding: chunked"],
        [b"POST /v1/completions HTTP/1.1", b"content-length: 5", b"content-length: 6"],
        [b"POST /v1/completions HTTP/1.1", b"content-length: -1"],
        [b"POST /v1/completions HTTP/1.1", b"content-length: 1e3"],
        [b"POST /v1/completions HTTP/1.1", b"transfer-encoding: chunked, identity"],
        [b"POST /v1/completions HTTP/1.1", b" content-length: 5"],
    ],
)
async def test_a_request_whose_end_is_not_clear_ends_its_connection(
    tmp_path: Path, lines: list[bytes]
) -> None:
    # Else what follows it could be taken for another client's request, behind a proxy.
    async with door(tmp_path) as d:
        head, _ = await raw(d, *lines, b"content-type: application/json")
        assert head.split()[1] in (b"400", b"501")
        assert b"\r\nconnection: close" in head.lower()
