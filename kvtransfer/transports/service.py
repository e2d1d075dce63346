"""KvTransferService: the receiver's end of pairings and writes.

Owns streams, and the slots that a stream may use. Must not know caches, frames' contents or
how a write is admitted; kvtransfer/receiver.py does. Back-pressure is HTTP/2 flow control for
frames inside the stream, and the number of granted slots for the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from baton.errors import BatonError, DeadlineExceeded, IncompatiblePeer, InvalidRequest, Unavailable
from baton.identity import Identity
from baton.logs import get_logger
from baton.v1 import kv_transfer_service_pb2
from baton.v1.kv_transfer_service_pb2 import PairRequest, PairResponse, PlacedFrames
from baton.versions import Versions
from kvtransfer.contract import Answer, Gone, Resend
from kvtransfer.receiver import IncomingWrite, KvReceiver
from kvtransfer.slots import Sender, SlotTable
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.grpc_codec import (
    WriteRequest,
    WriteResponse,
    decode_commit,
    decode_open,
    decode_request,
    encode_answer,
    encode_grant,
    read_format,
    sender_of,
)
from kvtransfer.transports.shm import OFFSET_BYTES
from kvtransfer.transports.writer import ADMITTED
from kvtransfer.version import TRANSFER_VERSIONS, agree
from kvtransfer.wire import HEADER_BYTES, claimed_bytes

SERVICE_NAME = "baton.v1.KvTransferService"
# For the first message of a write.
OPEN_S = 5.0
# Frames in slots that are stored before others have a turn; each takes some 0.2 ms.
_FRAMES_AT_A_TIME = 4

log = get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class KvService:
    """KvTransferService over a KvReceiver.

    identity: this worker. arena: slots for frames that do not come inside the stream; None has none.
    linger_s: for a sender to say that it writes into no slot any more, once its lease has ended.
    """

    def __init__(
        self,
        receiver: KvReceiver[Any],
        identity: Identity,
        arena: Arena | None = None,
        *,
        linger_s: float = 5.0,
    ) -> None:
        self.linger_s = linger_s
        self.counters: Counter[str] = Counter()
        self._receiver = receiver
        self._identity = identity
        self._arena = arena

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service: Registration(name=SERVICE_NAME, add=service.add_to)."""
        write = grpc.stream_stream_rpc_method_handler(
            self.write,
            request_deserializer=decode_request,
            response_serializer=WriteResponse.SerializeToString,
        )
        pair = grpc.unary_unary_rpc_method_handler(
            self.pair,
            request_deserializer=PairRequest.FromString,
            response_serializer=PairResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, {"Write": write, "Pair": pair}),)
        )

    @property
    def slots(self) -> SlotTable | None:
        """The arena's slots."""
        return None if self._arena is None else self._arena.slots

    @property
    def num_held_slots(self) -> int:
        """Slots that open writes have."""
        return 0 if self._arena is None else self._arena.slots.num_held

    async def pair(self, request: PairRequest, _context: object) -> PairResponse:
        """Compares what must agree, and offers memory; raises IncompatiblePeer naming the field."""
        version = agree(
            TRANSFER_VERSIONS,
            Versions(request.oldest_version, request.newest_version),
            request.hello.name or "the sender",
        )
        self._identity.check(request.hello)
        self._check_format(request)
        if request.has_digests != self._receiver.has_digests:
            raise IncompatiblePeer(
                f"kv_checksum is {_on(request.has_digests)} at {request.hello.name} and "
                f"{_on(self._receiver.has_digests)} at {self._identity.name}; set it alike on both",
                field="kv_checksum",
            )
        if self._arena is not None:
            self._arena.slots.met(Sender(request.hello.name, request.hello.incarnation))
        response = PairResponse(hello=self._identity.hello(), version=version)
        if request.wants:
            await self._offer(request.wants, response)
        return response

    def _check_format(self, request: PairRequest) -> None:
        try:
            self._receiver.check_format(read_format(request.format))
        except InvalidRequest as error:
            # Asking again would not help: it is how the sender's cache is made.
            raise IncompatiblePeer(error.message, field=error.field) from None

    async def _offer(self, wanted: str, response: PairResponse) -> None:
        try:
            if self._arena is None:
                raise Unavailable("the receiver has no arena (its arena_bytes is less than a slot)")
            response.slot_bytes = self._arena.slot_bytes
            if wanted == "shm":
                segment = self._arena.segment
                response.shm.path, response.shm.nonce = str(segment.path), segment.nonce
                response.shm.offset_bytes = OFFSET_BYTES
            elif wanted == "nixl":
                target = await self._arena.nixl()
                response.nixl.agent_metadata = target.metadata
                response.nixl.base_address = target.base_address
            else:
                response.note = f"{wanted} is not known here"
        except BatonError as error:
            response.note = error.message

    async def write(self, _requests: object, context: _Context) -> None:
        """One write, from its open to its one Committed or Gone."""
        loop = asyncio.get_running_loop()
        inbox = _Inbox(context)
        try:
            async with asyncio.timeout(OPEN_S):
                opening = await inbox.next()
            if not isinstance(opening, WriteRequest) or opening.WhichOneof("message") != "open":
                raise InvalidRequest("the first message of a write must be an open", field="open")
            opened = self._receiver.open(decode_open(opening.open), loop.time(), inbox.end)
            if isinstance(opened, IncomingWrite):
                await _Reception(self, opened, inbox, context).run(opening.open)
            else:
                await context.write(encode_answer(opened))
        except TimeoutError:
            raise DeadlineExceeded(f"a write must be opened within {OPEN_S:g} s") from None
        finally:
            inbox.close()

    @property
    def arena(self) -> Arena | None:
        """Where frames may lie."""
        return self._arena


class _Reception:
    """One admitted write and its stream."""

    def __init__(
        self, service: KvService, write: IncomingWrite[Any], inbox: _Inbox, context: _Context
    ) -> None:
        self._service = service
        self._write = write
        self._inbox = inbox
        self._context = context
        # Whether it has no slots, or its sender has said that it writes into none.
        self._is_quiet = True

    @property
    def attempt_id(self) -> bytes:
        """Of the write."""
        return self._write.lease.attempt_id

    async def run(self, opening: kv_transfer_service_pb2.OpenWrite) -> None:
        """Until the answer that ends the write, or the end of the stream."""
        try:
            # The sender waits for this: no frame is on its way to a write that is refused.
            await self._context.send_initial_metadata((ADMITTED,))
            if opening.wanted_slots:
                await self._grant(opening)
            await self._receive()
        finally:
            self._write.close()
            slots = self._service.slots
            if slots is not None:
                slots.end(self, self._now(), is_quiet=self._is_quiet)
                if not self._is_quiet:
                    self._service.counters["quarantined_writes"] += 1

    async def _grant(self, opening: kv_transfer_service_pb2.OpenWrite) -> None:
        granted: tuple[int, ...] = ()
        slots = self._service.slots
        if slots is not None:
            still_open = {opening.attempt_id, *opening.open_attempts}
            slots.vouched(
                sender_of(opening),
                lambda write: isinstance(write, _Reception) and write.attempt_id in still_open,
            )
            granted = slots.grant(self, sender_of(opening), opening.wanted_slots, self._now())
            self._is_quiet = not granted
        if not granted:
            self._service.counters["writes_without_slots"] += 1
        await self._context.write(encode_grant(granted))

    async def _receive(self) -> None:
        while (request := await self._inbox.next()) is not None:
            answer = request if isinstance(request, Gone) else await self._handle(request)
            if answer is None:
                continue
            if not isinstance(request, Gone | memoryview) and request.WhichOneof("message") == "commit":
                # Who commits has written everything; a resend is written after this answer.
                self._is_quiet = self._is_quiet or not isinstance(answer, Resend)
            await self._context.write(encode_answer(answer))
            if not isinstance(answer, Resend):
                await self._linger()
                break

    async def _handle(self, request: WriteRequest | memoryview) -> Answer | None:
        if isinstance(request, memoryview):
            return self._write.frame(request[:HEADER_BYTES], request[HEADER_BYTES:], self._now())
        match request.WhichOneof("message"):
            case "placed":
                return await self._read_slots(request.placed)
            case "commit":
                token = decode_commit(request.commit)
                return self._write.commit(request.commit.num_frames, token, self._now())
            case "quiet":
                self._is_quiet = True
                return None
            case _:
                raise InvalidRequest("after the open, a write carries frames and commits", field="message")

    async def _read_slots(self, placed: PlacedFrames) -> Answer | None:
        """Verifies and stores what lies in slots, and grants them again."""
        arena = self._service.arena
        if (
            arena is None
            or len({*placed.slots}) != len(placed.slots)
            or len(placed.slots) != len(placed.headers)
        ):
            raise InvalidRequest("every placed frame needs a header and a slot of its own", field="slots")
        for index, (slot, header) in enumerate(zip(placed.slots, placed.headers, strict=True), start=1):
            if not arena.slots.holds(self, slot):
                raise InvalidRequest(f"slot {slot} is not this write's", field="slots")
            payload = arena.payload(slot)[: claimed_bytes(header)]
            gone = self._write.frame(header, payload, self._now())
            if gone is not None:
                return gone
            if index % _FRAMES_AT_A_TIME == 0:
                # A batch of frames must not hold up everybody else's tokens.
                await asyncio.sleep(0)
        await self._context.write(encode_grant(placed.slots))
        return None

    async def _linger(self) -> None:
        """Lets a sender whose lease has ended say that it writes into no slot any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._service.linger_s):
                while not self._is_quiet and (request := await self._inbox.rest()) is not None:
                    if isinstance(request, WriteRequest) and request.WhichOneof("message") == "quiet":
                        self._is_quiet = True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


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
        read = self._reading()
        await asyncio.wait((read, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            return self._ended.result()
        return await self.rest()

    async def rest(self) -> WriteRequest | memoryview | None:
        """The next message, or None at the end of the stream, whatever became of the lease."""
        request: Any = await asyncio.shield(self._reading())
        self._read = None
        if request is grpc.aio.EOF:
            return None
        # The next one comes in while this one is looked at.
        self._reading()
        message: WriteRequest | memoryview = request
        return message

    def close(self) -> None:
        """Gives up the read under way, if any."""
        if self._read is not None:
            self._read.cancel()

    def _reading(self) -> asyncio.Task[Any]:
        # A read is never abandoned for another one: gRPC allows one at a time.
        if self._read is None:
            self._read = asyncio.ensure_future(self._context.read())
        return self._read


def _on(has_digests: bool) -> str:
    return "xxh3" if has_digests else "none"
