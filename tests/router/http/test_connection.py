"""One connection: what a peer sends early, what it reads slowly, heads in every size and form."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from router.http import server as servers
from router.http.connection import MAX_EARLY_BYTES
from tests.certificates import Authority
from tests.fakes import GUARD_S, until
from tests.router.http.door import door
from tests.router.http.scripted import chunk, scripted, summary

BODY = b'{"prompt":"x"}'


def request(*headers: bytes) -> bytes:
    head = [b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", *headers]
    return b"\r\n".join([*head, b"content-length: %d" % len(BODY), b"", b""]) + BODY


CLOSING = b"connection: close"


async def answer(request: Any, call: Any) -> None:
    await call.write(chunk("a", end=True))
    await call.write(summary(1))


@pytest.mark.parametrize(
    "pieces",
    [
        [request()],
        [request() * 2],
        [request(), request()],
        [request(), b"\r\n"],
        [request(CLOSING), b"\r\n"],
        [request(), b"x" * MAX_EARLY_BYTES],
    ],
    ids=["plain", "pipelined", "pipelined later", "line break", "line break, closing", "no HTTP"],
)
async def test_who_leaves_is_missed_whatever_it_sent_before(pieces: list[bytes], tmp_path: Path) -> None:
    async def wait(request: Any, call: Any) -> None:
        await asyncio.Event().wait()

    async with scripted(tmp_path, wait) as d:
        reader, writer = await asyncio.open_connection("127.0.0.1", d.server.port)
        writer.write(pieces[0])
        await until(lambda: d.inference.num_running == 1)
        for piece in pieces[1:]:
            writer.write(piece)
            await writer.drain()
        writer.close()
        await until(lambda: d.inference.num_running == 0)
        assert d.inference.num_requests == 1
        assert await reader.read() == b""


async def test_what_comes_early_is_bounded(tmp_path: Path) -> None:
    async def wait(request: Any, call: Any) -> None:
        await asyncio.Event().wait()

    async with scripted(tmp_path, wait) as d:
        reader, writer = await asyncio.open_connection("127.0.0.1", d.server.port)
        writer.write(request())
        await until(lambda: d.inference.num_running == 1)
        writer.write(b"x" * (MAX_EARLY_BYTES + 1))
        with suppress(ConnectionResetError):
            async with asyncio.timeout(GUARD_S):
                assert await reader.read() == b""
        await until(lambda: d.inference.num_running == 0)
        writer.close()


async def test_requests_that_come_early_are_answered_in_their_turn(tmp_path: Path) -> None:
    turn = asyncio.Semaphore(0)

    async def script(request: Any, call: Any) -> None:
        await turn.acquire()
        await answer(request, call)

    async with scripted(tmp_path, script) as d:
        reader, writer = await asyncio.open_connection("127.0.0.1", d.server.port)
        writer.write(request(b"x-request-id: r-0") + request(b"x-request-id: r-1"))
        await until(lambda: d.inference.num_running == 1)
        # The head of the third in two pieces, and one at a time all the same.
        third = request(b"x-request-id: r-2", CLOSING)
        for piece in (third[:20], third[20:]):
            writer.write(piece)
            await writer.drain()
        for number in range(3):
            await until(lambda number=number: d.inference.num_requests == number + 1)  # type: ignore[misc]
            assert d.inference.num_running == 1
            turn.release()
        async with asyncio.timeout(GUARD_S):
            whole = await reader.read()
        assert whole.count(b"HTTP/1.1 200") == 3
        assert whole.index(b"r-0") < whole.index(b"r-1") < whole.index(b"r-2")
        writer.close()


async def test_a_slow_reader_of_a_long_response_gets_it_whole(tmp_path: Path) -> None:
    size = 6_000_000

    async def script(request: Any, call: Any) -> None:
        await call.write(chunk("a" * size, end=True))
        await call.write(summary(1))

    # All of it takes longer than that; a piece does not.
    async with scripted(tmp_path, script, write_timeout_s=0.4) as d:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", d.server.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=64 * 1024)
        writer.write(request(CLOSING))
        received = b""
        while piece := await reader.read(64 * 1024):
            received += piece
            await asyncio.sleep(0.01)
        head, _, body = received.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["choices"][0]["text"] == "a" * size
        writer.close()


async def raw(port: int, *pieces: bytes) -> tuple[bytes, dict[str, str], Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    async with asyncio.timeout(GUARD_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return status.encode(), headers, json.loads(body)


async def test_every_answer_has_an_id_and_a_date(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        seen = set()
        for asked in (b"GARBAGE\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"):
            _, headers, _ = await raw(d.server.port, asked)
            seen.add(headers["x-request-id"])
            # What tests/router/http/door.py says it is.
            assert headers["date"] == "Tue, 14 Nov 2023 22:13:20 GMT"
        assert len(seen) == 2
        d.doorman.drain()
        status, headers, _ = await raw(d.server.port, b"GARBAGE\r\n\r\n")
        assert (status, headers["connection"]) == (b"HTTP/1.1 400 Bad Request", "close")


@pytest.mark.parametrize("place", ["header", "target"])
async def test_a_head_that_is_too_long_is_refused_though_it_is_whole(place: str, tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        # Where it comes in pieces it is refused before it is whole.
        for size, statuses in ((63_000, {b"200"}), (70_000, {b"431", b"400"})):
            filling = b"x" * size
            target, header = (b"/health", filling) if place == "header" else (b"/health?" + filling, b"")
            head = b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-y: %s\r\n\r\n" % (target, header)
            found, headers, _ = await raw(d.server.port, head)
            assert found.split()[1] in statuses
            assert headers["x-request-id"]


@pytest.mark.parametrize(
    ("target", "status"), [("http://h/health", 200), ("HTTPS://h:8/nope", 404), ("http://h", 404)]
)
async def test_a_target_may_be_a_whole_url(target: str, status: int, tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        head = f"GET {target} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
        found, _, _ = await raw(d.server.port, head.encode())
        assert int(found.split()[1]) == status


async def test_a_handshake_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HANDSHAKE_S", 0.05)
    async with scripted(tmp_path, answer, tls=Authority(tmp_path).issue("127.0.0.1")) as d:
        reader, writer = await asyncio.open_connection("127.0.0.1", d.server.port)
        async with asyncio.timeout(GUARD_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_body_with_two_lengths_is_refused_and_its_rest_is_no_request(tmp_path: Path) -> None:
    """RFC 9112, section 6.3: what one server takes for the rest of a body another takes for a request."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    lengths = b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n"
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    async with door(tmp_path) as d:
        host, _, port = d.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + lengths + smuggled)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"exclude each other" in answer
        assert answer.count(b"HTTP/1.1 ") == 1
        await d.idle()
