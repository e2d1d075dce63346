"""A gRPC server as every role runs it: one port, health, reflection, one translation of errors.

Owns the server's life from bind to stop. It knows no service: the owner passes registrations and says when
it is ready. Needs the packages for health checking and reflection, which the SDK alone does not install.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.bind import LOOPBACK, why_not
from baton.errors import BatonError, ConfigError, InternalError, InvalidRequest, Unavailable
from baton.logs import get_logger
from baton.rpc import SERVER_OPTIONS, to_status, translate

LAST_WORDS_S: Final = 0.1
# Open calls of one server. A call whose client reads nothing cannot be ended from this side, and a session
# costs the event loop its heartbeats: 10,000 opened at once made a worker silent for so long that its
# router gave it up.
MAX_CALLS: Final = 2_048
MAX_PROBES: Final = 32

# Names that the health service knows beside those of the services.
READINESS: Final = "readiness"
LIVENESS: Final = "liveness"

# Stands for a request that is no message.
_UNREADABLE: Final = object()

ResultT = TypeVar("ResultT")
Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One service of a server.

    name: its full name, for example "baton.v1.DecodeService".
    add: adds it, for example partial(add_DecodeServiceServicer_to_server, servicer).
    """

    name: str
    add: Callable[[grpc.aio.Server], None]


class RpcServer:
    """A listening server; its health is what the owner says with set_health(), at first alive but not ready.

    The health service knows "", "readiness" and the name of every service, which say whether the
    process takes requests, and "liveness", which says whether it makes progress.

    async with await RpcServer.start([registration], port=0) as server:
        await server.set_health(ready=True)
        print(server.address)
    """

    def __init__(
        self, server: grpc.aio.Server, host: str, port: int, names: Sequence[str], calls: Calls
    ) -> None:
        self._server = server
        self._calls = calls
        self._stopping: asyncio.Future[None] | None = None
        self._names = ("", READINESS, *names)
        self._is_ready, self._is_alive = False, True
        self._shown: dict[str, bool] = {}
        self._showing = asyncio.Lock()
        self._health = health.aio.HealthServicer()
        self._probed: grpc.aio.Server | None = None
        self.health_port = 0
        self.host, self.port = host, port

    @classmethod
    async def start(
        cls,
        registrations: Sequence[Registration],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        max_calls: int = MAX_CALLS,
        health_port: int | None = None,
        reflects: bool = True,
    ) -> Self:
        """Binds host:port and starts to serve.

        Args:
            registrations: the services.
            host: address to listen on; give a number rather than a name, which may stand for two addresses.
            port: TCP port; 0 takes a free one, which `port` then holds.
            credentials: for TLS; plain text without.
            max_calls: calls that may be open; more end at once with RESOURCE_EXHAUSTED. One connection gets
                half of them, and what it starts beyond that waits at its client.
            health_port: another port, of the health service alone and in plain text: Kubernetes' probes speak
                no TLS. None for none.
            reflects: whether whoever reaches the port may ask which methods it has; that needs no key.

        Raises:
            ConfigError: the address cannot be bound; the message says why and what to do.
        """
        calls = Calls()
        server = grpc.aio.server(
            options=[*SERVER_OPTIONS, ("grpc.max_concurrent_streams", max_calls // 2)],
            interceptors=[ErrorInterceptor(calls)],
            maximum_concurrent_rpcs=max_calls,
        )
        names = [registration.name for registration in registrations]
        self = cls(server, host, _bind(server, host, port, credentials), names, calls)
        for registration in registrations:
            registration.add(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if reflects:
            known = [*names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(known, server)
        await self.set_health(ready=False)
        await server.start()
        if health_port is not None:
            try:
                self._probed = await self._start_probed(health_port)
            except BaseException:
                await server.stop(None)
                raise
        return self

    async def _start_probed(self, port: int) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=SERVER_OPTIONS,
            interceptors=[ErrorInterceptor(self._calls)],
            maximum_concurrent_rpcs=MAX_PROBES,
        )
        self.health_port = _bind(server, self.host, port, None, setting="health_port")
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await server.start()
        return server

    @property
    def address(self) -> str:
        """host:port, as a client dials it."""
        return _join(self.host, self.port)

    async def set_health(self, *, ready: bool, alive: bool = True) -> None:
        """What the health service answers from now on. Cheap where nothing changes.

        ready: the process takes requests.
        alive: it makes progress; whoever watches ends a process that is not alive.
        """
        self._is_ready, self._is_alive = ready, alive
        # One at a time, and each tells what holds by then: a call that was held up must not bring back what a
        # later one has changed.
        async with self._showing:
            for name in (*self._names, LIVENESS):
                is_serving = self._is_serving(name)
                if self._shown.get(name) is not is_serving:
                    await self._health.set(name, _health_status(is_serving))
                    self._shown[name] = is_serving

    def _is_serving(self, name: str) -> bool:
        return self._is_alive if name == LIVENESS else self._is_ready and self._stopping is None

    async def stop(self, grace_s: float = 0.0) -> None:
        """Is not ready any more, takes no new calls, and ends running ones after grace_s seconds. Idempotent.

        Returns as soon as none runs; who watches its health or asks what it serves is not waited for.
        """
        if self._stopping is None:
            # Once only: gRPC crashes when two of its stops overlap.
            self._stopping = asyncio.ensure_future(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        await self.set_health(ready=False, alive=self._is_alive)
        stopping = asyncio.ensure_future(self._server.stop(grace_s))
        idle = asyncio.ensure_future(self._calls.none_left())
        await asyncio.wait((stopping, idle), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        # Those who watch hear of the change before their streams end.
        await asyncio.wait((stopping,), timeout=LAST_WORDS_S)
        self._calls.end_watches()
        await stopping
        if self._probed is not None:
            await self._probed.stop(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class Calls:
    """The calls of one server that run: its own, which are counted, and those of gRPC's own services."""

    def __init__(self) -> None:
        self._num_running = 0
        self._ended = asyncio.Event()
        self._watches: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def covering(self, method: str) -> AsyncIterator[None]:
        """Runs one call of that method; raises Unavailable once end_watches() was called, if it is gRPC's."""
        if not method.startswith("/grpc."):
            with self._counting():
                yield
            return
        try:
            async with asyncio.timeout(None) as watch:
                self._watches.add(watch)
                try:
                    yield
                finally:
                    self._watches.discard(watch)
        except TimeoutError:
            if not watch.expired():
                raise
            raise Unavailable("the server has stopped") from None

    def end_watches(self) -> None:
        """Ends the calls of gRPC's own services, some of which would last as long as their client."""
        for watch in self._watches:
            watch.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def _counting(self) -> Iterator[None]:
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._ended.set()

    async def none_left(self) -> None:
        """Returns once none runs."""
        while self._num_running:
            self._ended.clear()
            await self._ended.wait()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status: a BatonError as it says, anything else into INTERNAL.

    A client learns nothing of an unexpected exception but an id, which the log repeats with the
    details: a message or a stack trace may hold a prompt or a path.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wraps the handler of one call, which must be a coroutine function or an async generator."""
        handler = await continuation(handler_call_details)
        # None is gRPC's word for "no such method", which it answers itself; the stubs forbid returning it.
        return handler if handler is None else _guard(handler, handler_call_details.method, self._calls)  # type: ignore[return-value]


def _guard(
    handler: grpc.RpcMethodHandler[Any, Any], method: str, calls: Calls
) -> grpc.RpcMethodHandler[Any, Any]:
    kind = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    behavior: Behavior = getattr(handler, kind)
    deserialize = handler.request_deserializer
    if inspect.isasyncgenfunction(behavior):
        behavior = _pumping(behavior)

    async def guarded(request: Any, context: Context) -> Any:
        if request is _UNREADABLE:
            return await _abort(context, InvalidRequest(f"the message is none that {method} takes"))
        return await _answering(_covered(behavior(request, context), calls, method), context, method)

    build = getattr(grpc, f"{kind}_rpc_method_handler")
    wrapped: grpc.RpcMethodHandler[Any, Any] = build(
        guarded,
        # Of a stream whose message cannot be read gRPC ends the call; its peer is one of the cluster's.
        request_deserializer=deserialize if handler.request_streaming else _reading(deserialize),
        response_serializer=handler.response_serializer,
    )
    return wrapped


def _reading(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """deserialize; bytes that are no message give _UNREADABLE, where gRPC would log a traceback for each."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    return read


async def _covered(work: Awaitable[ResultT], calls: Calls, method: str) -> ResultT:
    async with calls.covering(method):
        return await work


def _pumping(behavior: Callable[[Any, Context], AsyncIterator[Any]]) -> Behavior:
    """A coroutine that writes what a generator yields.

    gRPC abandons a generator whose client has left, and its clean-up then waits for the garbage
    collector. Here it is closed by the call's own task, at once.
    """

    async def pump(request: Any, context: Context) -> None:
        async with aclosing(behavior(request, context)) as responses:  # type: ignore[type-var]
            async for response in responses:
                await context.write(response)

    return pump


async def _answering(work: Awaitable[ResultT], context: Context, method: str) -> ResultT:
    try:
        return await work
    except grpc.aio.AbortError:
        raise
    except BatonError as error:
        return await _abort(context, error)
    except grpc.aio.AioRpcError as error:
        return await _abort(context, translate(error))
    except Exception as error:
        if context.cancelled():
            raise
        return await _abort(context, _unexpected(error, method))


def _unexpected(error: Exception, method: str) -> InternalError:
    error_id = secrets.token_hex(8)
    log.error("rpc failed", error_id=error_id, method=method, exc_info=error)
    return InternalError(f"internal error {error_id}; the server's log has the details under this id")


async def _abort(context: Context, error: BatonError) -> NoReturn:
    code, details, metadata = to_status(error)
    await context.abort(code, details, (*context.trailing_metadata(), *metadata))


def _health_status(serving: bool) -> int:
    statuses = health_pb2.HealthCheckResponse
    return int(statuses.SERVING if serving else statuses.NOT_SERVING)


def _bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None,
    *,
    setting: str = "port",
) -> int:
    address = _join(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ConfigError(f"cannot listen on {address}: {why_not(host, port)}", field=setting) from None


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
