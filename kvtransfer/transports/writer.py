"""One open write at the sender: a gRPC stream for tickets, commits and answers, and a way for the frames.

Owns the stream, the jobs that read the cache for it, and what a broken stream means. Frames go
one of two ways:

- inside the stream, one message each (no carrier);
- into slots of the receiver's arena: a Carrier puts the payload there, the stream carries
  the headers, and the receiver grants a slot again once it has read it.

Must not know caches, how a write is admitted, or how a carrier reaches the receiver's memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from baton.errors import (
    BatonError,
    Cancelled,
    IncompatiblePeer,
    KvTransferFailed,
    PeerLost,
    Unavailable,
)
from baton.rpc import translate
from kvtransfer.contract import (
    Answer,
    AnsweredEarly,
    FirstToken,
    Gone,
    Offload,
    Outcome,
    OutgoingFrame,
    Resend,
    Ticket,
)
from kvtransfer.slots import Sender
from kvtransfer.transports.grpc_codec import (
    Grant,
    WriteResponse,
    decode_response,
    encode_commit,
    encode_frame,
    encode_open,
    encode_placed,
    encode_quiet,
)

T = TypeVar("T")

ADMITTED = ("baton-write", "admitted")
# For the receiver's end of a stream whose lease has ended; it has nothing to do but to read one message.
QUIET_S = 2.0

_Call = grpc.aio.StreamStreamCall[bytes, WriteResponse]


class Carrier(Protocol):
    """Puts payloads into one receiver's slots."""

    @property
    def num_slots(self) -> int:
        """Slots that one write would like to have; at least 1."""

    def fill(self, slots: Sequence[int], frames: Sequence[OutgoingFrame]) -> list[bytes]:
        """Reads the frames and returns their headers; runs off the event loop."""

    async def deliver(self, slots: Sequence[int], frames: Sequence[OutgoingFrame]) -> None:
        """Returns when the payloads are in the slots and nothing is on its way; raises PeerLost if it fails.

        Nobody cancels it.
        """


class GrpcKvWriter:
    """A KvWriter. A task reads the responses all the time: read() would drop what has not been
    read by the time the call has ended, iteration does not.
    """

    def __init__(
        self,
        call: _Call,
        attempt_id: bytes,
        worker: str,
        *,
        sender: Sender,
        offload: Offload[Any],
        carrier: Carrier | None = None,
        open_attempts: Iterable[bytes] = (),
    ) -> None:
        self.worker = worker
        self.wait_s = 0.0
        self.carrier_failure = ""
        self._call = call
        self._attempt_id = attempt_id
        self._sender = sender
        self._offload = offload
        self._carrier = carrier
        self._open_attempts = tuple(open_attempts)
        self._way: _Inline | _Placed = _Inline(self)
        self._jobs: set[asyncio.Future[Any]] = set()
        self._message: asyncio.Task[None] | None = None
        self._resends: deque[Resend] = deque()
        # The first of what ends the write; all later calls answer it.
        self._end: Outcome | BatonError | None = None
        self._granted: deque[int] = deque()
        self._was_granted = False
        # Whether the receiver may have given slots to this write, and has been told that they are not used.
        self._has_slots = carrier is not None
        self._is_quiet = False
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read(), name=f"kv-answers-{attempt_id.hex()[:8]}")

    @property
    def max_batch(self) -> int:
        """Most frames of one prepare()."""
        return self._way.max_batch

    @property
    def is_placed(self) -> bool:
        """Whether frames go into slots."""
        return isinstance(self._way, _Placed)

    async def begin(self, ticket: Ticket) -> None:
        """Presents the ticket and waits until the receiver has looked at it."""
        wanted_slots = 0 if self._carrier is None else self._carrier.num_slots
        await self.write(encode_open(ticket, self._sender, wanted_slots, self._open_attempts))
        if ADMITTED not in tuple(await self._call.initial_metadata()):
            await self._refuse()
        if self._carrier is not None:
            while not self._was_granted:
                self.check()
                await self._wait_for_news()
            if self._granted:
                self._way = _Placed(self, self._carrier, len(self._granted))

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> Any:
        """Reads frames from the cache; waits while the receiver is behind."""
        return await self._way.prepare(frames)

    async def post(self, prepared: Any) -> None:
        """Sends what prepare() returned."""
        await self._way.post(prepared)

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        """Commits and waits for the answer."""
        await self.write(encode_commit(num_frames, self._attempt_id, first_token))
        while self._end is None and not self._resends:
            await self._wait_for_news()
        if self._resends:
            return self._resends.popleft()
        assert self._end is not None
        if isinstance(self._end, BatonError):
            raise self._end
        return self._end

    async def close(self) -> None:
        """Ends the stream. Nothing reads the cache or writes into a slot when it returns. Idempotent."""
        try:
            if self._jobs:
                await asyncio.wait([*self._jobs])
            if self._has_slots and not self._reader.done() and not self.carrier_failure:
                # A receiver that is stuck has to see for itself what becomes of the slots.
                with suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_S):
                        await self._say_quiet()
                        await asyncio.wait([self._reader])
        finally:
            self._call.cancel()
            ending = [self._reader] if self._message is None else [self._reader, self._message]
            for task in ending:
                # gRPC never ends a first write whose channel was closed before the headers were out.
                task.cancel()
            await asyncio.wait(ending)

    def check(self) -> None:
        """Raises what has ended the write, if anything has: AnsweredEarly, PeerLost or KvTransferFailed."""
        if isinstance(self._end, BatonError):
            raise self._end
        if self._end is not None:
            raise AnsweredEarly(self._end)
        if self._resends:
            raise KvTransferFailed(f"{self.worker} asked for frames before the commit")

    async def job(self, function: Callable[[], T]) -> T:
        """Runs a function off the event loop, to its end."""
        self.check()
        return await self.wholly(self._offload(function))

    async def wholly(self, work: Awaitable[T]) -> T:
        """Does something that uses the cache or a slot, to its end even if cancelled: both are freed next."""
        running: asyncio.Future[T] = asyncio.ensure_future(work)
        self._jobs.add(running)
        running.add_done_callback(self._jobs.discard)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            if not running.cancelled():
                running.exception()  # marks it as seen
            raise cancelled
        return running.result()

    async def take_slots(self, count: int) -> list[int]:
        """That many slots, as soon as the receiver has granted them."""
        began = asyncio.get_running_loop().time()
        self.check()
        while len(self._granted) < count:
            await self._wait_for_news()
            self.check()
        self.wait_s += asyncio.get_running_loop().time() - began
        return [self._granted.popleft() for _ in range(count)]

    async def write(self, data: bytes) -> None:
        """Sends one message; raises AnsweredEarly or PeerLost."""
        self.check()
        if not self._has_slots:
            await self._send(data)
            return
        # A cancelled write would end the stream, and with it the way to say that the slots are free.
        self._message = asyncio.create_task(self._send(data))
        await asyncio.shield(self._message)

    async def _send(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; the reader knows why.
            await self._refuse()
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            await self._refuse()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _refuse(self) -> NoReturn:
        """Raises what has ended the write, as soon as that is known."""
        while True:
            self.check()
            await self._wait_for_news()

    async def _read(self) -> None:
        end: BatonError = PeerLost(f"the transfer to {self.worker} ended without an answer")
        try:
            async for response in self._call:
                self._hear(decode_response(response))
                if isinstance(self._end, Gone):
                    # At once: whoever uses this writer may be waiting for tokens, for long.
                    await self._say_quiet()
        except grpc.aio.AioRpcError as error:
            end = end_of(error, self.worker)
        finally:
            self._end = self._end or end
            self._news.set()

    def _hear(self, said: Answer | Grant | None) -> None:
        if isinstance(said, Grant):
            self._has_slots = self._has_slots and (self._was_granted or bool(said.slots))
            self._was_granted = True
            self._granted.extend(said.slots)
        elif isinstance(said, Resend):
            self._resends.append(said)
        else:
            self._end = self._end or said
        self._news.set()

    async def _say_quiet(self) -> None:
        """Lets the receiver use the slots again at once; it would quarantine them otherwise."""
        under_way = [*self._jobs] if self._message is None else [*self._jobs, self._message]
        if under_way:
            await asyncio.wait(under_way)
        # Of what a carrier failed to write, something may still be under way.
        if self._has_slots and not self._is_quiet and not self.carrier_failure:
            self._is_quiet = True
            # If the receiver has ended the stream already, it has no use for this.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(encode_quiet())
                await self._call.done_writing()


class _Inline:
    """Frames inside the stream."""

    # Handing a job to the reading thread and back takes as long as reading a frame.
    max_batch = 4

    def __init__(self, writer: GrpcKvWriter) -> None:
        self._writer = writer

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> list[bytes]:
        """Messages with header and payload."""
        return await self._writer.job(lambda: [encode_frame(f.header(), f.runs()) for f in frames])

    async def post(self, messages: list[bytes]) -> None:
        """Flow control holds it up while the receiver is behind."""
        for message in messages:
            await self._writer.write(message)


class _Placed:
    """Frames in slots. Half of the slots are filled while the receiver reads the other half."""

    def __init__(self, writer: GrpcKvWriter, carrier: Carrier, num_slots: int) -> None:
        self.max_batch = max(1, num_slots // 2)
        self._writer = writer
        self._carrier = carrier

    async def prepare(
        self, frames: Sequence[OutgoingFrame]
    ) -> tuple[list[int], Sequence[OutgoingFrame], list[bytes]]:
        """Slots, their frames and the headers."""
        slots = await self._writer.take_slots(len(frames))
        headers = await self._writer.job(lambda: self._carrier.fill(slots, frames))
        return slots, frames, headers

    async def post(self, prepared: tuple[list[int], Sequence[OutgoingFrame], list[bytes]]) -> None:
        """Says where the frames are once they are there."""
        slots, frames, headers = prepared
        self._writer.check()
        await self._writer.wholly(self._deliver(slots, frames))
        await self._writer.write(encode_placed(slots, headers))

    async def _deliver(self, slots: list[int], frames: Sequence[OutgoingFrame]) -> None:
        try:
            await self._carrier.deliver(slots, frames)
        except PeerLost as error:
            self._writer.carrier_failure = error.message
            raise


def is_cancelled() -> bool:
    """Whether a CancelledError means this task: gRPC raises it too when a channel is closed under a call."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


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
