"""KV over gRPC streams: KvTransferService and its client. Works everywhere.

Owns channels, streams and the translation of gRPC's errors. Must not know
caches, frames' contents or how a write is admitted; kvtransfer/receiver.py does.
Back-pressure is HTTP/2 flow control: a write waits until the receiver reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from baton.errors import (
    BatonError,
    Cancelled,
    IncompatiblePeer,
    InvalidRequest,
    KvTransferFailed,
    PeerLost,
    Unavailable,
)
from baton.rpc import CHANNEL_OPTIONS, translate
from kvtransfer.contract import (
    Answer,
    AnsweredEarly,
    FirstToken,
    Gone,
    Resend,
    Ticket,
    TransferTarget,
)
from kvtransfer.receiver import IncomingWrite, KvReceiver
from kvtransfer.transports.grpc_codec import (
    WriteRequest,
    WriteResponse,
    decode_answer,
    decode_commit,
    decode_open,
    decode_request,
    encode_answer,
    encode_commit,
    encode_frame,
    encode_open,
)

SERVICE_NAME = "baton.v1.KvTransferService"
_METHOD = f"/{SERVICE_NAME}/Write"
# Channels to the same address would otherwise share connections and their back-off, and a
# worker that came back at its old address would be met with the old one's state.
_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

ADMITTED = ("baton-write", "admitted")

_Context = grpc.aio.ServicerContext[bytes, WriteResponse]
_Call = grpc.aio.StreamStreamCall[bytes, WriteResponse]


class GrpcKvService:
    """KvTransferService over a KvReceiver."""

    def __init__(self, receiver: KvReceiver[Any]) -> None:
        self._receiver = receiver

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service: Registration(name=SERVICE_NAME, add=service.add_to)."""
        handler = grpc.stream_stream_rpc_method_handler(
            self.write,
            request_deserializer=decode_request,
            response_serializer=WriteResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, {"Write": handler}),)
        )

    async def write(self, _requests: object, context: _Context) -> None:
        """One write, from its open to its one Committed or Gone."""
        loop = asyncio.get_running_loop()
        inbox = _Inbox(context)
        try:
            opening = await inbox.next()
            if not isinstance(opening, WriteRequest) or opening.WhichOneof("message") != "open":
                raise InvalidRequest("the first message of a write must be an open", field="open")
            opened = self._receiver.open(decode_open(opening.open), loop.time(), inbox.end)
            if isinstance(opened, IncomingWrite):
                await self._receive(opened, inbox, context)
            else:
                await context.write(encode_answer(opened))
        finally:
            inbox.close()

    async def _receive(self, write: IncomingWrite[Any], inbox: _Inbox, context: _Context) -> None:
        loop = asyncio.get_running_loop()
        try:
            # The sender waits for this: no frame is on its way to a write that is refused.
            await context.send_initial_metadata((ADMITTED,))
            while (request := await inbox.next()) is not None:
                answer = request if isinstance(request, Gone) else _handle(write, request, loop.time())
                if answer is not None:
                    await context.write(encode_answer(answer))
                    if not isinstance(answer, Resend):
                        break
        finally:
            write.close()


class _Inbox:
    """A sender's messages, and the end of its lease: nothing polls, and nobody waits in vain."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._ended: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()
        self._read: asyncio.Task[Any] | None = None

    def end(self, gone: Gone) -> None:
        """Makes next() return `gone`, now and from now on."""
        self._ended.set_result(gone)

    async def next(self) -> WriteRequest | memoryview | Gone | None:
        """The next message, or None at the end of the stream, or Gone as soon as the lease has ended."""
        # A read is never abandoned for another one: gRPC allows one at a time.
        if self._read is None:
            self._read = asyncio.ensure_future(self._context.read())
        await asyncio.wait((self._read, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            return self._ended.result()
        read, self._read = self._read, None
        request: Any = read.result()
        return None if request is grpc.aio.EOF else request

    def close(self) -> None:
        """Gives up the read under way, if any."""
        if self._read is not None:
            self._read.cancel()


def _handle(write: IncomingWrite[Any], request: WriteRequest | memoryview, now: float) -> Answer | None:
    if isinstance(request, memoryview):
        return write.frame(request, now)
    if request.WhichOneof("message") != "commit":
        raise InvalidRequest("after the open, a write carries frames and commits", field="message")
    return write.commit(request.commit.num_frames, decode_commit(request.commit), now)


@dataclass(slots=True, eq=False)
class _Connection:
    channel: grpc.aio.Channel
    num_writes: int = 0
    is_retired: bool = False

    async def ready(self, worker: str) -> None:
        """Waits for the connection; raises PeerLost as soon as an attempt to connect fails."""
        while (state := self.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise PeerLost(f"cannot connect to {worker}")
            await self.channel.wait_for_state_change(state)

    async def retire(self) -> None:
        """Closes it once its last write has ended."""
        self.is_retired = True
        if self.num_writes == 0:
            await self.channel.close()


class GrpcKvTransport:
    """The client: one channel per incarnation of a receiver.

    A channel is dropped when its peer cannot be reached, when another incarnation
    is met at the same address, or when max_connections others are fresher.
    """

    def __init__(self, *, max_connections: int = 256) -> None:
        self._max_connections = max_connections
        self._connections: dict[tuple[str, int], _Connection] = {}

    @property
    def num_connections(self) -> int:
        """Channels that are kept for further writes."""
        return len(self._connections)

    async def connect(self, target: TransferTarget) -> None:
        """Opens and warms the channel to a target; raises PeerLost if it cannot be reached."""
        connection = self._connection(target)
        for key in self._superseded(target):
            await self._connections.pop(key).retire()
        try:
            await connection.ready(target.worker)
        except PeerLost:
            if self._connections.get((target.address, target.incarnation)) is connection:
                del self._connections[target.address, target.incarnation]
            await connection.retire()
            raise

    def _connection(self, target: TransferTarget) -> _Connection:
        key = (target.address, target.incarnation)
        connection = self._connections.pop(key, None)
        if connection is None:
            connection = _Connection(grpc.aio.insecure_channel(target.address, options=_CHANNEL_OPTIONS))
        self._connections[key] = connection  # at the end: the freshest
        return connection

    def _superseded(self, target: TransferTarget) -> list[tuple[str, int]]:
        keys = list(self._connections)
        num_surplus = max(0, len(keys) - self._max_connections)
        stale = [
            (address, incarnation)
            for address, incarnation in keys[num_surplus:]
            if address == target.address and incarnation != target.incarnation
        ]
        return keys[:num_surplus] + stale

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[GrpcKvWriter]:
        """Opens a write; leaving the context cancels the stream if it has not ended."""
        connection = self._connection(target)
        connection.num_writes += 1
        # Requests are serialized where their buffers are at hand; gRPC gets bytes.
        method: grpc.aio.StreamStreamMultiCallable[bytes, WriteResponse] = connection.channel.stream_stream(
            _METHOD, response_deserializer=WriteResponse.FromString
        )
        writer = GrpcKvWriter(method(), ticket.attempt_id, target.worker)
        try:
            await writer.begin(ticket)
            yield writer
        finally:
            connection.num_writes -= 1
            await writer.close()
            if connection.is_retired:
                await connection.retire()

    async def close(self) -> None:
        """Ends all writes and closes all channels; idempotent."""
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            await connection.channel.close()


class GrpcKvWriter:
    """One open write over one stream.

    A task reads the answers all the time: read() would drop what has not been
    read by the time the call has ended, iteration does not.
    """

    def __init__(self, call: _Call, attempt_id: bytes, worker: str) -> None:
        self._call = call
        self._attempt_id = attempt_id
        self._worker = worker
        self._answers: asyncio.Queue[Answer | BatonError] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(), name=f"kv-answers-{attempt_id.hex()[:8]}")

    async def begin(self, ticket: Ticket) -> None:
        """Presents the ticket and waits until the receiver has looked at it."""
        await self._write(lambda: encode_open(ticket))
        if ADMITTED not in tuple(await self._call.initial_metadata()):
            await self._refuse()

    async def send_frame(self, header: bytes, payload: memoryview) -> None:
        """Sends one frame; raises AnsweredEarly or PeerLost."""
        await self._write(lambda: encode_frame(header, payload))

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        """Commits and waits for the answer."""
        await self._write(lambda: encode_commit(num_frames, self._attempt_id, first_token))
        return await self._answer()

    async def close(self) -> None:
        """Ends the stream; idempotent."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _write(self, encode: Callable[[], bytes]) -> None:
        if not self._answers.empty():
            await self._refuse()
        try:
            await self._call.write(encode())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; the reader knows why.
            await self._refuse()
        except asyncio.CancelledError:
            # gRPC raises this too when the channel is closed under a call.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            await self._refuse()

    async def _refuse(self) -> None:
        answer = await self._answer()
        if isinstance(answer, Resend):
            raise KvTransferFailed(f"{self._worker} asked for frames before the commit")
        raise AnsweredEarly(answer)

    async def _answer(self) -> Answer:
        answer = await self._answers.get()
        if isinstance(answer, BatonError):
            raise answer
        return answer

    async def _read(self) -> None:
        end: BatonError = PeerLost(f"the transfer to {self._worker} ended without an answer")
        try:
            async for response in self._call:
                answer = decode_answer(response)
                if answer is not None:
                    self._answers.put_nowait(answer)
        except grpc.aio.AioRpcError as error:
            end = end_of(error, self._worker)
        finally:
            self._answers.put_nowait(end)


def end_of(error: grpc.aio.AioRpcError, worker: str) -> BatonError:
    """What a failed stream means to a transfer: PeerLost, IncompatiblePeer or KvTransferFailed."""
    translated = translate(error)
    message = f"the transfer to {worker} broke: {translated.message}"
    # A write into a broken stream leaves INTERNAL without the metadata that our servers add.
    is_broken = error.code() is grpc.StatusCode.INTERNAL and not error.trailing_metadata()
    if is_broken or isinstance(translated, Unavailable | Cancelled):
        return PeerLost(message)
    if isinstance(translated, IncompatiblePeer):
        return translated
    return KvTransferFailed(message)
