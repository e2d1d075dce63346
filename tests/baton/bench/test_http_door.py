"""The HTTP door against a server of a few lines that cuts its stream where it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from baton.bench.http_connection import Endpoint
from baton.bench.http_door import HttpTarget
from baton.bench.outcome import Planned
from baton.errors import BatonError, InternalError, Overloaded, Unavailable

REQUEST = Planned(at_s=0.0, token_ids=(5, 6, 7), max_tokens=3)
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, *, num_connections: int = 1) -> AsyncIterator[HttpTarget]:
    connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await handler(head + await reader.readexactly(length), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = HttpTarget(Endpoint.parse(f"http://127.0.0.1:{port}"), api_key="secret")
    target.model = "tiny"
    yield target
    target.close()
    server.close()
    assert connections == num_connections


def event(text: str, completion_tokens: int | None) -> bytes:
    usage = None if completion_tokens is None else {"completion_tokens": completion_tokens}
    return b"data: " + json.dumps({"choices": [{"text": text}], "usage": usage}).encode() + b"\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


async def counts(target: HttpTarget) -> list[int]:
    return [count async for count in target.answer(REQUEST, 5.0)]


async def test_tokens_are_counted_by_usage_wherever_the_stream_is_cut() -> None:
    asked: list[bytes] = []
    whole = event("a", 1) + b": ping\n\n" + event("bc", 3) + b"data: [DONE]\n\n"

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        # Cut in the middle of a line, and of a word.
        writer.write(STREAM + chunked(whole[:9], whole[9:40], whole[40:]) + b"0\r\n\r\n")

    async with serving(handler) as target:
        # Twice on one connection, which serving() counts.
        assert await counts(target) == [1, 2]
        assert await counts(target) == [1, 2]

    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(body) == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def test_without_usage_each_text_is_one_token_and_the_last_usage_corrects_it() -> None:
    last = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'

    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        pieces = event("", None) + event("a", None) + event("bc", None) + last
        writer.write(STREAM + chunked(pieces) + b"0\r\n\r\n")

    async with serving(handler) as target:
        assert await counts(target) == [1, 1, 1]


async def test_a_refusal_is_the_error_of_its_status_with_the_servers_words() -> None:
    body = b'{"error": {"message": "the queue is full", "code": "rate_limit_exceeded"}}'

    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with serving(handler) as target:
        with pytest.raises(Overloaded, match="HTTP 429: the queue is full"):
            await counts(target)


async def test_an_error_in_the_middle_of_the_stream_is_no_success() -> None:
    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        failure = b'data: {"error": {"message": "the worker is lost"}}\n\n'
        writer.write(STREAM + chunked(event("a", 1), failure) + b"0\r\n\r\n")

    async with serving(handler) as target:
        with pytest.raises(BatonError, match="the worker is lost"):
            await counts(target)


async def test_a_stream_that_breaks_off_is_unavailable() -> None:
    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunked(event("a", 1)))
        await writer.drain()
        writer.close()

    async with serving(handler) as target:
        with pytest.raises(Unavailable, match="broke the response off"):
            await counts(target)


async def test_a_server_that_hung_up_after_an_answer_is_dialled_again() -> None:
    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunked(event("a", 1)) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with serving(handler, num_connections=2) as target:
        assert await counts(target) == [1]
        # The end of the stream is heard.
        (idle,) = target._idle
        while idle.is_open:
            await asyncio.sleep(0.001)
        assert await counts(target) == [1]


async def test_the_model_is_the_first_one_listed() -> None:
    body = b'{"data": [{"id": "smollm2"}]}'

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        assert request.startswith(b"GET /v1/models HTTP/1.1\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with serving(handler) as target:
        assert await target.find_model() == "smollm2"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.7:8000", Endpoint(host="10.0.0.7", port=8000, is_tls=False, prefix="")),
        ("https://llm.example/api/", Endpoint(host="llm.example", port=443, is_tls=True, prefix="/api")),
        ("http://[::1]:8000", Endpoint(host="::1", port=8000, is_tls=False, prefix="")),
        ("localhost:8000", Endpoint(host="localhost", port=8000, is_tls=False, prefix="")),
    ],
)
def test_urls(url: str, expected: Endpoint) -> None:
    assert Endpoint.parse(url) == expected


@pytest.mark.parametrize("url", ["", "ftp://a:1", "http://", "http://a:1?x=1"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL"):
        Endpoint.parse(url)


MALFORMED = {
    "a chunk size": STREAM + b"zz\r\n",
    "a negative chunk size": STREAM + b"-5\r\n",
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "a status": b"HTTP/1.1 \xb2\r\n\r\n",
    "a line without an end": b"HTTP/1.1 200 OK\r\nx: " + b"a" * (2 << 20) + b"\r\n\r\n",
    "characters": STREAM + chunked(b"data: \xff\n\n"),
    "a choice": STREAM + chunked(b'data: {"choices":[1]}\n\n'),
    "choices": STREAM + chunked(b'data: {"choices":5}\n\n'),
    "an event": STREAM + chunked(b"data: [1]\n\n"),
    "an event too deep": STREAM + chunked(b"data: " + b"[" * 100_000 + b"\n\n"),
    "a usage": STREAM + chunked(event("a", 10**12)),
}


@pytest.mark.parametrize("response", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_malformed_fails_its_request_only(response: bytes) -> None:
    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(response)

    async with serving(handler) as target:
        with pytest.raises(InternalError):
            await counts(target)


@pytest.mark.parametrize("body", [b"[]", b'{"data": {"id": "a"}}', b'{"data": [5]}', b'{"data": [{}]}'])
async def test_what_is_no_list_of_models_is_said(body: bytes) -> None:
    async def handler(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with serving(handler) as target:
        with pytest.raises(InternalError, match="lists no model"):
            await target.find_model()
