"""Real loopback servers: errors of all four call kinds, health, reflection, a taken port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.errors import BatonError, ConfigError, InternalError, InvalidRequest, Overloaded
from baton.rpc import MAX_MESSAGE_BYTES, open_channel, translate
from baton.rpc_server import Registration, RpcServer

NAME = "baton.test.Echo"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Context = grpc.aio.ServicerContext


class Echo:
    """Answers bytes with the same bytes; some inputs make it fail."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def answer(self, message: bytes, context: Context) -> bytes:
        match message:
            case b"overloaded":
                context.set_trailing_metadata((("request-id", "r1"),))
                raise Overloaded("queue full", field="queue", retry_after_s=0.25)
            case b"defect":
                raise RuntimeError("the prompt was: tell me a secret")
            case b"abort":
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, "own words")
            case b"forever":
                await self._forever()
        return message

    async def _forever(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def unary_unary(self, request: bytes, context: Context) -> bytes:
        return await self.answer(request, context)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        return b"".join([await self.answer(request, context) async for request in requests])

    async def unary_stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            yield await self.answer(request, context)
        finally:
            self.closed.set()

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self.answer(request, context)

    async def writing(self, request: bytes, context: Context) -> None:
        await context.write(b"first")
        await context.write(await self.answer(request, context))

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(self, kind)) for kind in KINDS}
        handlers["writing"] = grpc.unary_stream_rpc_method_handler(self.writing)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


class Caller:
    """Calls any kind the same way: bytes in, a list of bytes out, BatonError on failure."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def start(self, kind: str, message: bytes) -> grpc.aio.Call:
        shape = "unary_stream" if kind == "writing" else kind
        method = getattr(self.channel, shape)(f"/{NAME}/{kind}")
        return method(iter([message]) if shape.startswith("stream") else message)

    async def __call__(self, kind: str, message: bytes) -> list[bytes]:
        call = self.start(kind, message)
        try:
            if kind.endswith("unary"):
                return [await call]
            return [response async for response in call]
        except grpc.aio.AioRpcError as error:
            raise translate(error) from error


@asynccontextmanager
async def serving(echo: Echo) -> AsyncIterator[tuple[RpcServer, Caller]]:
    async with (
        await RpcServer.start([Registration(name=NAME, add=echo.add_to)]) as server,
        open_channel(server.address) as channel,
    ):
        yield server, Caller(channel)


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_unchanged(kind: str) -> None:
    async with serving(Echo()) as (_, call):
        assert (await call(kind, b"hello"))[-1] == b"hello"


async def test_a_handler_may_write_instead_of_yield() -> None:
    async with serving(Echo()) as (_, call):
        assert await call("writing", b"hello") == [b"first", b"hello"]
        with pytest.raises(Overloaded):
            await call("writing", b"overloaded")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_arrives_as_it_was_raised(kind: str) -> None:
    async with serving(Echo()) as (_, call):
        with pytest.raises(Overloaded) as caught:
            await call(kind, b"overloaded")
    assert (caught.value.message, caught.value.field) == ("queue full", "queue")
    assert caught.value.retry_after_s == 0.25


async def test_an_error_keeps_the_metadata_that_the_handler_set() -> None:
    async with serving(Echo()) as (_, call):
        with pytest.raises(Overloaded) as caught:
            await call("unary_unary", b"overloaded")
    assert ("request-id", "r1") in list(caught.value.__cause__.trailing_metadata())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_defect_tells_the_client_an_id_and_the_log_the_rest(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Echo()) as (_, call):
        with pytest.raises(InternalError) as caught:
            await call(kind, b"defect")
    record = next(record for record in caplog.records if record.name == "baton.rpc_server")
    assert "secret" not in caught.value.message
    assert record.msg["error_id"] in caught.value.message
    assert record.msg["method"] == f"/{NAME}/{kind}"
    assert "tell me a secret" in str(record.msg["exc_info"])


async def test_a_handlers_own_abort_is_left_alone() -> None:
    async with serving(Echo()) as (_, call):
        with pytest.raises(InvalidRequest, match="own words") as caught:
            await call("unary_unary", b"abort")
    assert caught.value.__cause__.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(Echo()) as (_, call):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.channel.unary_unary(f"/{NAME}/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_cancelled_call_cancels_its_handler_without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    echo = Echo()
    async with serving(echo) as (_, call):
        running = call.start("unary_stream", b"forever")
        assert await running.read() == b"first"
        running.cancel()
        await asyncio.wait_for(echo.cancelled.wait(), 5)
        await asyncio.wait_for(echo.closed.wait(), 5)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_generator_whose_client_does_not_read_is_closed_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = asyncio.Event()

    class Flood(Echo):
        async def unary_stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(65536)
            finally:
                closed.set()

    async with serving(Flood()) as (_, call):
        running = call.start("unary_stream", b"")
        await running.read()
        running.cancel()
        await asyncio.wait_for(closed.wait(), 5)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_message_of_the_stated_size_passes_and_a_larger_one_is_refused() -> None:
    async with serving(Echo()) as (_, call):
        assert len((await call("unary_unary", bytes(MAX_MESSAGE_BYTES)))[0]) == MAX_MESSAGE_BYTES
        with pytest.raises(InvalidRequest, match="larger than max"):
            await call("unary_unary", bytes(MAX_MESSAGE_BYTES + 1))


async def test_a_stopped_server_is_unavailable() -> None:
    async with serving(Echo()) as (server, call):
        await server.stop()
        with pytest.raises(BatonError) as caught:
            await call("unary_unary", b"")
    assert caught.value.code == "UNAVAILABLE"


async def check(stub: health_pb2_grpc.HealthStub, service: str) -> str:
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_health_is_what_the_owner_says() -> None:
    echo, other = Echo(), "baton.test.Other"
    registrations = [
        Registration(name=NAME, add=echo.add_to),
        Registration(name=other, add=lambda _: None),
    ]
    ready = ("", "readiness", NAME, other)
    async with await RpcServer.start(registrations) as server, open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert [await check(stub, name) for name in (*ready, "liveness")] == [*4 * ["NOT_SERVING"], "SERVING"]
        await server.set_health(ready=True)
        assert [await check(stub, name) for name in (*ready, "liveness")] == 5 * ["SERVING"]
        await server.set_health(ready=False, alive=False)
        assert [await check(stub, name) for name in (*ready, "liveness")] == 5 * ["NOT_SERVING"]


class SlowHealth:
    """Takes what a server says of its health. gate: what the first of it has to wait for."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.told: list[tuple[str, bool]] = []
        self._gate = gate

    async def set(self, service: str, status: int) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            await gate.wait()
        self.told.append((service, status == health_pb2.HealthCheckResponse.SERVING))


async def test_health_is_told_where_it_changes_only() -> None:
    async with serving(Echo()) as (server, _):
        health = server._health = SlowHealth()
        for ready in (False, False, True, True, False):
            await server.set_health(ready=ready)
        names = ("", "readiness", NAME)
        assert health.told == [(name, ready) for ready in (True, False) for name in names]
        await server.set_health(ready=False, alive=False)
        assert health.told[6:] == [("liveness", False)]


async def test_what_was_held_up_does_not_undo_what_was_said_later() -> None:
    async with serving(Echo()) as (server, _):
        gate = asyncio.Event()
        health = server._health = SlowHealth(gate)
        ready = asyncio.create_task(server.set_health(ready=True))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(server.set_health(ready=False))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(ready, leaving)
        assert not any(dict(health.told).values()), health.told


async def test_a_health_watch_hears_of_the_stop_and_does_not_hold_it_up() -> None:
    async with serving(Echo()) as (server, call):
        await server.set_health(ready=True)
        stub = health_pb2_grpc.HealthStub(call.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        progress = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        serving_status = health_pb2.HealthCheckResponse.SERVING
        assert [(await call.read()).status for call in (watch, progress)] == [serving_status, serving_status]
        stopping = asyncio.create_task(server.stop(grace_s=60))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # A process that leaves as it should is not to be killed for that.
        with pytest.raises(grpc.aio.AioRpcError):
            await progress.read()
        await asyncio.wait_for(stopping, 5)


async def test_a_call_that_runs_may_end_while_the_server_stops() -> None:
    async with serving(Echo()) as (server, call):
        stream = call.channel.stream_stream(f"/{NAME}/stream_stream")()
        await stream.write(b"one")
        assert await stream.read() == b"one"
        stopping = asyncio.create_task(server.stop(grace_s=60))
        await stream.write(b"two")
        assert await stream.read() == b"two"
        assert not stopping.done()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 5)


async def test_reflection_lists_the_services() -> None:
    async with serving(Echo()) as (_, call):
        stub = reflection_pb2_grpc.ServerReflectionStub(call.channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        response = await stub.ServerReflectionInfo(requests).read()
    names = {service.name for service in response.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_a_server_that_does_not_reflect_lists_nothing() -> None:
    async with (
        await RpcServer.start([Registration(name=NAME, add=Echo().add_to)], reflects=False) as server,
        open_channel(server.address) as channel,
    ):
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_port_names_the_address_and_the_remedy() -> None:
    async with serving(Echo()) as (server, _):
        with pytest.raises(ConfigError) as caught:
            await RpcServer.start([], port=server.port)
    assert f"127.0.0.1:{server.port}" in caught.value.message
    assert "choose another port" in caught.value.message
    assert caught.value.field == "port"


@pytest.mark.parametrize(
    ("host", "words"), [("192.0.2.1", "choose a host of this machine"), ("no.such.host.invalid", "unknown")]
)
async def test_a_host_that_is_not_here_says_so(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await RpcServer.start([], host=host)


async def test_the_default_is_loopback_and_any_free_port() -> None:
    async with serving(Echo()) as (server, _):
        assert server.host == "127.0.0.1"
        with socket.create_connection(("127.0.0.1", server.port), timeout=5):
            pass


async def test_calls_beyond_the_bound_wait_at_their_client_or_are_refused() -> None:
    async with (
        await RpcServer.start([Registration(name=NAME, add=Echo().add_to)], max_calls=4) as server,
        open_channel(server.address) as channel,
        open_channel(server.address) as other,
        open_channel(server.address) as third,
    ):
        held = [Caller(each).start("unary_stream", b"forever") for each in (channel, channel, other, other)]
        for one in held:
            # Only a call that the server has taken has a first answer.
            assert await anext(aiter(one)) == b"first"
        waiting = asyncio.create_task(Caller(channel)("unary_unary", b"hello"))
        with pytest.raises(Overloaded, match="as many calls open as it takes"):
            await Caller(third)("unary_unary", b"hello")
        assert not waiting.done()
        # Its connection has half of the calls, whatever others leave free.
        for one in held[2:]:
            one.cancel()
        await until_taken(Caller(third))
        assert not waiting.done()
        held[0].cancel()
        assert await waiting == [b"hello"]
        held[1].cancel()


async def until_taken(call: Caller) -> None:
    """Calls until the server has heard that others are gone."""
    async with asyncio.timeout(10):
        while True:
            with suppress(Overloaded):
                await call("unary_unary", b"hello")
                return
