"""The port: taken or free, plain or TLS, its connections and their limits, and its end."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader

from baton.errors import ConfigError, Draining
from baton.metrics import configure_metrics, meter, shutdown_metrics
from router.__main__ import max_connections
from router.config import RouterConfig
from router.http import connection as connections
from router.metrics import RouterMetrics
from tests.certificates import Authority
from tests.fakes import GUARD_S, until
from tests.router.http.door import door, events
from tests.router.http.scripted import chunk, scripted, summary


async def answer(request: Any, call: Any) -> None:
    await call.write(chunk("a", end=True))
    await call.write(summary(1))


async def test_a_port_that_is_taken_names_its_setting(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        with pytest.raises(ConfigError, match="another process listens there") as error:
            async with scripted(tmp_path / "b", answer, port=d.server.port):
                pass
        assert error.value.field == "http_port"
    with pytest.raises(ConfigError) as error:
        async with scripted(tmp_path / "c", answer, port=70_000):
            pass
    assert error.value.field == "http_port"


async def test_with_a_certificate_it_is_https_and_asks_clients_for_none(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("127.0.0.1")
    async with scripted(tmp_path, answer, tls=tls) as d:
        trusting = ssl.create_default_context(cafile=tls.ca)
        url = f"https://{d.server.address}/v1/completions"
        async with httpx.AsyncClient(verify=trusting) as http:
            response = await http.post(url, json={"prompt": "x", "stream": True})
            assert events(response.text)[-1] == "[DONE]"
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get(f"https://{d.server.address}/health")
        with pytest.raises(httpx.HTTPError):
            await d.http.get("/health")
    with pytest.raises(ConfigError) as error:
        async with scripted(tmp_path / "b", answer, tls=replace(tls, key=str(tmp_path / "gone"))):
            pass
    assert error.value.field == "tls_key"


async def test_connections_are_kept_for_the_next_request(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        for _ in range(5):
            assert (await d.complete()).status_code == 200
            assert (await d.complete(stream=True)).status_code == 200
            assert (await d.complete(prompt=3)).status_code == 400
        assert len(d.server._state.connections) == 1


async def test_what_follows_a_head_is_not_held_back_until_that_is_acknowledged(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        assert (await d.complete()).status_code == 200
        (connection,) = d.server._state.connections
        assert connection.transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY
        )


async def test_a_thousand_streams_at_once(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def script(request: Any, call: Any) -> None:
        await call.write(chunk("a"))
        await may_end.wait()
        await call.write(chunk("b", end=True))
        await call.write(summary(2))

    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + body

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            return await reader.read()
        finally:
            writer.close()

    async with scripted(tmp_path, script) as d:
        asking = [asyncio.create_task(ask(d.server.port)) for _ in range(1000)]
        await until(lambda: d.inference.num_running == 1000)
        may_end.set()
        async with asyncio.timeout(GUARD_S):
            answers = await asyncio.gather(*asking)
    assert all(raw.startswith(b"HTTP/1.1 200") and b"data: [DONE]\n\n" in raw for raw in answers)


async def test_more_connections_than_may_be_are_reset(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer, max_connections=1) as d:
        assert (await d.complete()).status_code == 200
        async with httpx.AsyncClient(base_url=str(d.http.base_url)) as another:
            with pytest.raises(httpx.HTTPError):
                await another.get("/health")
        assert (await d.complete()).status_code == 200


async def raw(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(GUARD_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_request_that_does_not_arrive_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.05)
    begun = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n"
    )
    async with scripted(tmp_path, answer) as d:
        for pieces in ([], [b"GET /hea"], [begun], [begun + b"\r\n", b"{"]):
            assert await raw(d.server.port, *pieces) == b""
        await until(lambda: not d.server._state.connections)
        assert d.doorman._num_running == 0
        # What has arrived may take as long as it takes, and between two requests there is no hurry.
        assert (await d.complete()).status_code == 200
        await asyncio.sleep(0.1)
        assert len(d.server._state.connections) == 1


async def test_what_is_no_http_is_answered_in_json(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        response = await raw(d.server.port, b"\x16\x03\x01hello\r\n\r\n")
        head, _, body = response.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_headers_without_an_end_are_not_collected(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        many = (b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(4000))
        # 4 MB; a reset can overtake the answer where the peer is still sending.
        response = await raw(d.server.port, b"GET /health HTTP/1.1\r\nhost: x\r\n", *many)
        assert response == b"" or response.startswith(b"HTTP/1.1 400")
        await until(lambda: not d.server._state.connections)


async def test_requests_on_one_connection_are_answered_in_their_order(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        second = b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        response = await raw(d.server.port, first + second)
        assert response.count(b"HTTP/1.1 200") == 2
        assert response.index(b'"ok"') < response.index(b'"ready"')


async def test_the_version_is_batons(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        assert (await d.http.get("/version")).json() == {"version": version("baton-serve")}


@pytest.mark.parametrize(
    ("open_files", "most"),
    [(resource.RLIM_INFINITY, 1200), (10_000, 1200), (1024, 512), (600, 150), (64, 16)],
)
def test_connections_leave_files_for_everything_else(
    open_files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (open_files, open_files))
    # Four for each of 300 requests, of what is left of the files.
    assert max_connections(RouterConfig(model="m", max_requests=300)) == most


async def test_ready_says_why_not(tmp_path: Path) -> None:
    async with scripted(tmp_path, answer) as d:
        ready = await d.http.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        d.fleet.is_complete = False
        ready = await d.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "nobody is there")
        assert (await d.http.get("/health")).status_code == 200
        d.doorman.drain()
        ready = await d.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "this router is about to leave")
        assert (await d.http.get("/health")).status_code == 200


async def test_a_router_that_leaves_refuses_new_requests_and_ends_those_it_has(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def script(request: Any, call: Any) -> None:
        await call.write(chunk("a"))
        await may_end.wait()
        await call.write(chunk("b", end=True))
        await call.write(summary(2))

    async with scripted(tmp_path, script) as d:
        running = asyncio.create_task(d.complete(stream=True))
        await until(lambda: d.inference.num_running == 1)
        stopping = asyncio.create_task(d.server.stop(GUARD_S))
        await until(lambda: d.doorman.is_draining)
        # A client that comes now is told; its connection is not kept.
        async with httpx.AsyncClient(base_url=str(d.http.base_url)) as another:
            refused = await another.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        assert not stopping.done()
        may_end.set()
        assert events((await running).text)[-1] == "[DONE]"
        async with asyncio.timeout(GUARD_S):
            await stopping
        with pytest.raises(httpx.ConnectError):
            await d.complete()


async def test_what_runs_when_the_grace_is_over_hears_so_and_ends(tmp_path: Path) -> None:
    is_over = asyncio.Event()

    async def script(request: Any, call: Any) -> None:
        if call.traceparent:
            await call.write(chunk("a"))
        await is_over.wait()
        raise Draining("this router is about to leave")

    async with scripted(tmp_path, script) as d:
        body = {"prompt": "x", "stream": True}
        begun = asyncio.create_task(
            d.http.post("/v1/completions", json=body, headers={"traceparent": "00-1"})
        )
        waiting = asyncio.create_task(d.http.post("/v1/completions", json=body))
        await until(lambda: d.inference.num_running == 2)
        stopping = asyncio.create_task(d.server.stop(GUARD_S))
        is_over.set()
        assert [*events((await begun).text)[-1]] == ["error"]
        assert (await waiting).status_code == 503
        await stopping


async def test_a_request_that_outlasts_even_that_is_cut(tmp_path: Path) -> None:
    async def script(request: Any, call: Any) -> None:
        await call.write(chunk("a"))
        await asyncio.Event().wait()

    async with scripted(tmp_path, script) as d:
        running = asyncio.create_task(d.complete(stream=True))
        await until(lambda: d.inference.num_running == 1)
        async with asyncio.timeout(GUARD_S):
            await d.server.stop(0.01)
        with pytest.raises(httpx.HTTPError):
            await running
        assert d.inference.num_running == 0


async def test_metrics_are_what_the_process_counts(tmp_path: Path) -> None:
    async with door(tmp_path) as d:
        configure_metrics("baton-router", "router-0", PrometheusMetricReader(registry=d.registry))
        try:
            metrics = RouterMetrics(meter())
            metrics.shed("rate")
            metrics.placed("remote", "normal", 0.25)
            response = await d.http.get("/metrics")
        finally:
            shutdown_metrics()
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        assert any(line.startswith("baton_router_shed") and 'reason="rate"' in line for line in lines)
        counts = [line for line in lines if line.startswith("baton_router_queue_duration_seconds_count")]
        assert [line.rpartition(" ")[2] for line in counts] == ["1.0"]
