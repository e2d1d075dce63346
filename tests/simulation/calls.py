"""gRPC's calls over the simulated network: what Baton's own session, KV and public code is run on.

Owns the translation between connections and the few methods of grpc.aio that the product
uses. Messages travel as serialized protobuf; only bytes cross the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from baton.errors import BatonError
from baton.rpc import to_status
from tests.simulation.net import CANCELLED, REFUSED, Connection, End, Network, Over
from tests.simulation.virtual_loop import Process

Metadata = tuple[tuple[str, str], ...]
OK = Over("OK", "")
# A caller says that it sends nothing more.
DONE_WRITING = object()


class Tap(Protocol):
    """Sees what processes read and answer."""

    def read(self, connection: Connection, from_caller: bool, data: bytes, message: Any) -> None:
        """A process read a message."""

    def sent(self, connection: Connection, message: Any) -> None:
        """A caller sends a message."""

    def answered(self, connection: Connection, message: Any) -> None:
        """A server sends a message."""


class Headers:
    """The initial metadata of an answer."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata


class Opening:
    """The first thing that travels: metadata and the time left, in seconds."""

    def __init__(self, metadata: Metadata, remaining_s: float | None) -> None:
        self.metadata = metadata
        self.remaining_s = remaining_s


async def _send(end: End, data: bytes) -> None:
    """Sends; raises as grpc.aio does if the call has ended, or ends while this waits for room."""
    if end.over is None:
        await end.out.send(data, len(data))
    if end.over is not None:
        raise asyncio.InvalidStateError("RPC already finished.")


class ClientCall:
    """What grpc.aio gives a client for one call."""

    def __init__(self, connection: Connection, decode: Callable[[bytes], Any], tap: Tap) -> None:
        self._connection = connection
        self._end = connection.caller
        self._decode = decode
        self._tap = tap
        self._headers: asyncio.Future[Metadata] = asyncio.get_running_loop().create_future()
        self._is_cancelled = False
        self.names = connection.names
        self._deadline: asyncio.TimerHandle | None = None

    async def write(self, message: Any) -> None:
        """Sends; raises as grpc.aio does once the call has ended."""
        self._tap.sent(self._connection, message)
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await _send(self._end, data)

    def send(self, message: Any) -> None:
        """Sends the one request of a call that has only one."""
        data = message.SerializeToString()
        self._end.out.num_waiting_bytes += len(data)
        self._end.out.push(data)

    async def done_writing(self) -> None:
        """The server reads the end of the requests, and may go on answering."""
        if self._end.over is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._end.out.push(DONE_WRITING)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of the call."""
        return self._end.over is not None

    def expire_in(self, remaining_s: float) -> None:
        """Ends the call at its deadline, as gRPC does at the caller."""
        over = Over("DEADLINE_EXCEEDED", "Deadline Exceeded")
        hang_up = self._connection.hang_up
        self._deadline = asyncio.get_running_loop().call_later(remaining_s, hang_up, self._end, over)

    def limit_window(self, num_bytes: int) -> None:
        """What this client takes before it has read it."""
        self._end.into.window_bytes = num_bytes

    def limit_sending(self, num_bytes: int) -> None:
        """What the server takes before it has read it."""
        self._end.out.window_bytes = num_bytes

    def cancel(self) -> None:
        """Hangs up."""
        self._is_cancelled = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._connection.hang_up(self._end, CANCELLED)
        self._settle(())

    async def initial_metadata(self) -> Metadata:
        """The server's headers; empty if the call ends without any."""
        return await self._headers

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """The next message; the headers are noticed on the way."""
        try:
            item = await self._item()
        except BaseException:
            self._settle(())
            raise
        self._end.into.consumed(len(item))
        message = self._decode(item)
        self._tap.read(self._connection, False, item, message)
        return message

    async def _item(self) -> bytes:
        while True:
            item = await self._end.next()
            if self._is_cancelled:
                raise asyncio.CancelledError
            if isinstance(item, Over):
                raise self._error(item)
            if isinstance(item, bytes):
                return item
            self._settle(item.metadata)

    def _settle(self, metadata: Metadata) -> None:
        if not self._headers.done():
            self._headers.set_result(metadata)

    def _error(self, over: Over) -> Exception:
        if over.code == "OK":
            return StopAsyncIteration()
        return grpc.aio.AioRpcError(
            grpc.StatusCode[over.code], grpc.aio.Metadata(), grpc.aio.Metadata(*over.metadata), over.details
        )


class ServerCall:
    """What grpc.aio gives a servicer for one call: its context, and its request iterator."""

    def __init__(
        self, connection: Connection, opening: Opening, decode: Callable[[bytes], Any], tap: Tap
    ) -> None:
        self._connection = connection
        self._end = connection.server
        self._opening = opening
        self._decode = decode
        self._tap = tap
        self._has_headers = False
        self._has_all = False
        self._deadline_at: float | None = None
        if opening.remaining_s is not None:
            self._deadline_at = asyncio.get_running_loop().time() + opening.remaining_s

    def peer(self) -> str:
        return self._connection.names[0]

    def time_remaining(self) -> float | None:
        if self._deadline_at is None:
            return None
        return max(0.0, self._deadline_at - asyncio.get_running_loop().time())

    def invocation_metadata(self) -> Metadata:
        return self._opening.metadata

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        if not self._has_headers:
            self._has_headers = True
            self._end.out.push(Headers(tuple(metadata)))

    async def write(self, message: Any) -> None:
        await self.send_initial_metadata(())
        self._tap.answered(self._connection, message)
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await _send(self._end, data)

    async def read(self) -> Any:
        item = None if self._has_all else await self._end.next()
        if item is None or item is DONE_WRITING or isinstance(item, Over):
            self._has_all = True
            return grpc.aio.EOF
        self._end.into.consumed(len(item))
        message = self._decode(item)
        self._tap.read(self._connection, True, item, message)
        return message

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


Handler = Callable[[ServerCall], Awaitable[None]]


class Method:
    """One RPC that a process serves. decode: its requests."""

    def __init__(self, handler: Handler, decode: Callable[[bytes], Any]) -> None:
        self.handler = handler
        self.decode = decode


class Server:
    """The server of one process: each call is a task of the process, cancelled when the caller goes."""

    def __init__(self, net: Network, process: Process, methods: dict[str, Method], tap: Tap) -> None:
        self._process = process
        self._methods = methods
        self._tap = tap
        self._running: dict[asyncio.Task[None], None] = {}
        self._is_stopping = False
        net.listen(process, self._accept)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, and ends those that still run after grace_s seconds."""
        self._is_stopping = True
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
            for task in self._running:
                task.cancel()

    def _accept(self, connection: Connection, opening: Opening) -> None:
        if self._is_stopping:
            connection.hang_up(connection.server, REFUSED)
            return
        method = self._methods[connection.kind]
        call = ServerCall(connection, opening, method.decode, self._tap)
        task = self._process.spawn(
            self._serve(connection, method.handler, call), f"serve-{connection.kind}-{connection.names[0]}"
        )
        self._running[task] = None
        task.add_done_callback(self._running.pop)

        def over(reason: Over) -> None:
            # Ended by the handler itself, the task is about to end anyway.
            if reason.code != "OK" and connection.server.on_over is over:
                task.cancel()

        connection.server.on_over = over

    async def _serve(self, connection: Connection, handler: Handler, call: ServerCall) -> None:
        end: End = connection.server
        outcome = OK
        try:
            await handler(call)
        except BatonError as error:
            code, details, metadata = to_status(error)
            outcome = Over(code.name, details, metadata)
        except asyncio.InvalidStateError:
            # The caller is gone; gRPC logs it.
            outcome = CANCELLED
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        except Exception as error:
            outcome = Over("UNKNOWN", repr(error))
            raise
        finally:
            end.on_over = lambda reason: None
            connection.hang_up(end, outcome)


class Caller:
    """Opens calls from one process."""

    def __init__(self, net: Network, process: Process, tap: Tap) -> None:
        self._net = net
        self._process = process
        self._tap = tap

    def open(
        self,
        kind: str,
        server: str,
        decode: Callable[[bytes], Any],
        *,
        metadata: Metadata = (),
        remaining_s: float | None = None,
    ) -> ClientCall:
        """A new call of that kind."""
        connection = self._net.call(kind, self._process, server, Opening(metadata, remaining_s))
        call = ClientCall(connection, decode, self._tap)
        if remaining_s is not None:
            call.expire_in(remaining_s)
        return call
