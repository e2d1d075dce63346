"""Streams of events: their bytes, their failures, their silences, and readers that leave or do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from baton.errors import Draining, PoisonRequest, Unavailable
from baton.v1.inference_service_pb2 import GenerateRequest
from router.http import event_stream
from router.inference import Call
from tests.fakes import GUARD_S, expected_answer, until
from tests.router.http.door import KV, door, events
from tests.router.http.scripted import chunk, scripted, started, summary
from tests.router.tiny_text import BOS, byte_tokenizer, ids_of

PROMPT = [BOS, *ids_of("hello")]
# Characters of two to four bytes, and what Unicode takes for a line break.
TEXTS = ["é", "€", "😀", "a\n\nb", "data: x", "\u2028\x85", '"', ""]


async def say_texts(request: GenerateRequest, call: Call) -> None:
    await call.write(started())
    for text in TEXTS:
        await call.write(chunk(text))
    await call.write(chunk("end", end=True))
    await call.write(summary(len(TEXTS) + 1))


async def test_a_stream_can_be_cut_anywhere(tmp_path: Path) -> None:
    async with scripted(tmp_path, say_texts) as d:
        response = await d.complete(stream=True, stream_options={"include_usage": True})
        whole = response.content
    expected = [*TEXTS, "end"]
    for cut in range(1, len(whole)):
        pieces: Iterator[bytes] = iter([whole[:cut], whole[cut:]])
        data = [event.data for event in SSEDecoder().iter_bytes(pieces)]
        *parts, usage, done = data
        assert [json.loads(part)["choices"][0]["text"] for part in parts] == expected
        assert (json.loads(usage)["choices"], done) == ([], "[DONE]")


async def test_each_piece_on_the_wire_is_one_whole_event_of_ascii(tmp_path: Path) -> None:
    async with scripted(tmp_path, say_texts) as d:
        request = d.http.build_request("POST", "/v1/completions", json={"prompt": "x", "stream": True})
        response = await d.http.send(request, stream=True)
        raw = b"".join([piece async for piece in response.aiter_raw()])
    assert raw.isascii()
    assert raw.count(b"\n\n") == raw.count(b"\n") / 2 == len(TEXTS) + 2
    headers = response.headers
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-encoding" not in headers


async def test_nothing_goes_out_before_the_first_token(tmp_path: Path) -> None:
    may_speak = asyncio.Event()

    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(started())
        await may_speak.wait()
        await call.write(chunk("a", end=True))
        await call.write(summary(1))

    async with scripted(tmp_path, script) as d:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        asking = asyncio.create_task(d.http.post("/v1/chat/completions", json=body))
        await until(lambda: d.inference.num_running == 1)
        (connection,) = d.server._state.connections
        assert connection.cycle.response_started is False
        may_speak.set()
        first, done = events((await asking).text)
        # The role comes with the first token, not before it.
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
        assert done == "[DONE]"


@asynccontextmanager
async def reading(d: Any, **body: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a stream, as they come."""
    async with d.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "stream": True, **body}
    ) as response:
        assert response.status_code == 200
        yield response.aiter_lines()


async def next_event(lines: AsyncIterator[str]) -> Any:
    async with asyncio.timeout(GUARD_S):
        async for line in lines:
            if line and not line.startswith("event: "):
                return line if line.startswith(":") else json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has ended")


async def test_each_token_is_sent_when_it_comes(tmp_path: Path) -> None:
    turn = asyncio.Semaphore(0)

    async def script(request: GenerateRequest, call: Call) -> None:
        for text in "abc":
            await turn.acquire()
            await call.write(chunk(text))
        await call.write(summary(3))

    async with scripted(tmp_path, script) as d:
        turn.release()
        async with reading(d) as lines:
            for text in "abc":
                event = await next_event(lines)
                assert event["choices"][0]["text"] == text
                turn.release()


async def test_a_silent_stream_is_kept_open_by_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream.EventStream.__init__, "__defaults__", (0.05,))
    may_end = asyncio.Event()

    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(chunk("a"))
        await may_end.wait()
        await call.write(chunk("b", end=True))
        await call.write(summary(2))

    async with scripted(tmp_path, script) as d, reading(d) as lines:
        assert (await next_event(lines))["choices"][0]["text"] == "a"
        assert [await next_event(lines), await next_event(lines)] == [": ping", ": ping"]
        may_end.set()
        while (event := await next_event(lines)) == ": ping":
            pass
        assert event["choices"][0]["text"] == "b"


@pytest.mark.parametrize("error", [Unavailable("it is gone", retry_after_s=2.0), PoisonRequest("it kills")])
async def test_before_the_first_token_a_failure_is_a_status(error: Any, tmp_path: Path) -> None:
    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(started())
        raise error

    async with scripted(tmp_path, script) as d:
        response = await d.complete(stream=True)
        assert response.status_code == (503 if isinstance(error, Unavailable) else 500)
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["message"] == error.message


@pytest.mark.parametrize("error", [Unavailable("it is gone"), RuntimeError("a secret")])
async def test_after_the_first_token_a_failure_is_one_event_and_the_end(error: Any, tmp_path: Path) -> None:
    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(chunk("a"))
        await call.write(chunk("b"))
        raise error

    async with scripted(tmp_path, script) as d:
        response = await d.complete(stream=True, stream_options={"include_usage": True})
        assert response.status_code == 200
        first, second, last = events(response.text)
        assert [part["choices"][0]["finish_reason"] for part in (first, second)] == [None, None]
        assert [*last] == ["error"]
        assert last["error"]["type"] == "server_error"
        named = [block.startswith("event: error\n") for block in response.text.split("\n\n")[:-1]]
        assert named == [False, False, True]
        assert "secret" not in response.text


async def test_a_decode_worker_that_dies_for_good_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        d.cluster.network.may_commit.clear()
        body = {"prompt": "hello", "max_tokens": 50, "temperature": 0, "stream": True}
        async with d.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            event = await next_event(lines)
            assert event["choices"][0]["text"] == byte_tokenizer().decode(expected_answer(PROMPT, 1, KV))
            await until(lambda: d.cluster.network.num_commits_waiting == 1)
            await d.cluster.kill("decode-0")
            last = await next_event(lines)
            assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "unavailable")
            assert [line async for line in lines if line] == []
        d.cluster.network.may_commit.set()
        await until(lambda: d.inference.num_requests == 0)


async def test_without_workers_a_stream_is_refused_by_its_status(tmp_path: Path) -> None:
    async with door(tmp_path, num_decode=0) as d:
        response = await d.complete(prompt="hello", stream=True)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["code"] == "unavailable"
        await d.idle()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_ends_its_request_everywhere(stream: bool, tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 50, "temperature": 0, "n": 2, "stream": stream}
    async with door(tmp_path) as d:
        for _ in range(5):
            d.cluster.network.may_commit.clear()
            asking = asyncio.create_task(d.http.post("/v1/completions", json=body))
            await until(lambda: d.cluster.network.num_commits_waiting == 1)
            asking.cancel()
            await asyncio.wait([asking])
            await d.idle()
            d.cluster.network.may_commit.set()
        response = await d.complete(prompt="hello", max_tokens=5)
        assert response.json()["choices"][0]["finish_reason"] == "length"
        await d.idle()


async def test_a_client_may_leave_before_it_is_served_or_before_its_body_is_there(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        (link,) = d.cluster.stage.fleet.prefill_links()
        credit, link.credit = link.credit, 0
        asking = asyncio.create_task(d.complete(prompt="hello", max_tokens=2, stream=True))
        await until(lambda: len(d.cluster.stage.queue) == 1)
        asking.cancel()
        await d.idle()
        assert len(d.cluster.stage.queue) == 0
        link.credit = credit
        _, writer = await asyncio.open_connection("127.0.0.1", d.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 100\r\n\r\n{")
        await writer.drain()
        await until(lambda: d.server._doorman._num_running == 1)
        writer.close()
        await until(lambda: d.server._doorman._num_running == 0)
        await d.idle()
        assert (await d.complete(prompt="hello", max_tokens=2)).status_code == 200


async def test_the_callers_deadline_ends_its_request(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        d.cluster.network.may_commit.clear()
        body = {"prompt": "hello", "max_tokens": 50}
        response = await d.http.post("/v1/completions", json=body, headers={"x-request-timeout-s": "0.15"})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert response.headers["x-should-retry"] == "false"
        await d.idle()


BIG = "x" * 10_000


async def test_a_reader_that_does_not_read_holds_back_its_own_answer_only(tmp_path: Path) -> None:
    written: dict[str, int] = {}

    async def script(request: GenerateRequest, call: Call) -> None:
        for _ in range(1500):
            await call.write(chunk(BIG))
            written[request.text] = written.get(request.text, 0) + 1
            await asyncio.sleep(0)  # as between two tokens
        await call.write(chunk("", end=True))
        await call.write(summary(1500))

    async with scripted(tmp_path, script, write_timeout_s=0.3) as d:
        slow = [await send_raw(d.server.port, f"slow {number}") for number in range(10)]
        await until(lambda: len(written) == 10)
        fast = await d.complete(prompt="fast", stream=True)
        assert len(events(fast.text)) == 1502
        # Of 15 MB, what both ends' kernels take and 64 KiB beside.
        assert all(count < 1400 for text, count in written.items() if text.startswith("slow")), written
        sizes = [connection.transport.get_write_buffer_size() for connection in d.server._state.connections]
        assert max(sizes) < 64 * 1024 + 2 * len(BIG)
        # Nothing is read for longer than the limit: they are cut off, and their requests end.
        await until(lambda: d.inference.num_running == 0)
        for reader, writer in slow:
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readuntil(b"[DONE]")
            writer.close()


async def test_a_slow_reader_gets_everything_in_order(tmp_path: Path) -> None:
    async def script(request: GenerateRequest, call: Call) -> None:
        for number in range(800):
            await call.write(chunk(f"{number} {BIG}"))
        await call.write(summary(800))

    async with scripted(tmp_path, script) as d, reading(d) as lines:
        seen = []
        for number in range(800):
            seen.append(int((await next_event(lines))["choices"][0]["text"].split()[0]))
            if number % 100 == 0:
                await asyncio.sleep(0.02)  # slower than the script
        assert seen == list(range(800))


async def send_raw(port: int, prompt: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request by a client that reads nothing by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 30)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    body = json.dumps({"prompt": prompt, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    await writer.drain()
    return reader, writer


async def test_a_router_that_leaves_ends_streams_with_an_error_that_says_so(tmp_path: Path) -> None:
    async def script(request: GenerateRequest, call: Call) -> None:
        await call.write(chunk("a"))
        raise Draining("this router is about to leave")

    async with scripted(tmp_path, script) as d:
        _, last = events((await d.complete(stream=True)).text)
        assert last["error"]["code"] == "draining"
        assert last["error"]["message"].endswith("an answer that has begun cannot go on: ask again")
