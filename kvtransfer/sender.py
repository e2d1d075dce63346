"""KvSender: sends the KV of computed prompts, on the prefill worker's event loop.

Owns: one task per transfer, the order of its frames, resends, and the stall
deadline. Must not know gRPC, leases, or when tokens get computed; it is told.

    async with sender.transfer(source, target) as transfer:
        transfer.blocks_ready(512)           # as chunks complete; never waits
        transfer.layers_ready(3)             # while the last chunk is computed
        outcome = await transfer.commit(first_token)

Block ownership: the sender only ever reads, and never frees. The caller keeps
all blocks of the source until commit() or result() has returned or raised, or
the context is left; after that nothing reads them any more. With an outcome of
Gone, or an error, the same blocks can be sent to another target.

While a batch of frames is on its way to the receiver, the next is read from the
cache: the writer's prepare() and post() overlap, and nothing else does. A batch waits
for the same event: what a device is still computing holds up no frame that it is not of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from baton.errors import ConfigError, KvTransferFailed
from engine.stored import DONE, Stored
from kvtransfer.contract import (
    MAX_PAYLOAD_BYTES,
    AnsweredEarly,
    Committed,
    FirstToken,
    KvTransport,
    KvWriter,
    Outcome,
    Resend,
    Ticket,
    TransferTarget,
)
from kvtransfer.event_thread import EventThread
from kvtransfer.outgoing import CacheFrame, Reader
from kvtransfer.plan import MAX_FRAME_BYTES, FramePlan
from kvtransfer.stored_layers import StoredLayers
from kvtransfer.transfer_times import TransferTimes
from kvtransfer.wire import FrameSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderConfig:
    """How transfers behave.

    max_frame_bytes: largest payload of one frame, in bytes; one block of one layer is
        never split, whatever its size.
    stall_timeout_s: a single step of a transfer (connect, one frame, the answer
        to a commit) that takes longer ends it. Waiting for tokens does not count.
    max_resends: how often one frame is sent again.
    has_digests: whether frames carry a digest; only off where the receivers are told so too.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    stall_timeout_s: float = 10.0
    max_resends: int = 3
    has_digests: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_frame_bytes <= MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"max_frame_bytes is {self.max_frame_bytes}; it must be in 1..{MAX_PAYLOAD_BYTES}",
                field="max_frame_bytes",
            )
        if self.stall_timeout_s <= 0:
            raise ConfigError(
                f"stall_timeout_s is {self.stall_timeout_s}; it must be above 0", field="stall_timeout_s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """What is sent: a snapshot of a request as its prefill began.

    block_ids: all blocks of the sequence in the sender's cache; borrowed.
    num_tokens: tokens whose KV must arrive, held tokens included.
    """

    attempt_id: bytes
    block_ids: Sequence[int]
    num_tokens: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOutcome:
    """How a transfer ended.

    num_bytes: payload sent, resends included.
    duration_s: from the first frame to the answer.
    hidden_share: of num_bytes, what was sent when the last token was computed; 0 if there was none to send.
    """

    outcome: Outcome
    num_bytes: int
    duration_s: float
    hidden_share: float = 0.0
    times: TransferTimes = field(default_factory=TransferTimes, compare=False)


class KvSender:
    """All outgoing transfers of one prefill worker.

    events: waits for those of a device; without it the reader does, and other frames with it.
    """

    def __init__(
        self,
        reader: Reader,
        transport: KvTransport,
        config: SenderConfig | None = None,
        *,
        events: EventThread | None = None,
    ) -> None:
        self.reader = reader
        self.transport = transport
        self.config = config or SenderConfig()
        self.events = events
        self.num_resent_frames = 0
        self._open: set[Transfer] = set()

    @property
    def num_open_transfers(self) -> int:
        """Transfers whose context has not been left."""
        return len(self._open)

    def totals(self) -> dict[str, int]:
        """Counts since the start, which only grow."""
        return {
            **self.transport.counters,
            **self.reader.counters,
            "resent_frames": self.num_resent_frames,
        }

    @asynccontextmanager
    async def transfer(self, source: KvSource, target: TransferTarget) -> AsyncIterator[Transfer]:
        """Opens a transfer at once; leaving the context ends it, whatever its state."""
        transfer = Transfer(self, source, target)
        self._open.add(transfer)
        try:
            yield transfer
        finally:
            try:
                await transfer.stop()
            finally:
                self._open.discard(transfer)


class Transfer:
    """One transfer. Created by KvSender.transfer()."""

    def __init__(self, sender: KvSender, source: KvSource, target: TransferTarget) -> None:
        self.source = source
        self._sender = sender
        self._target = target
        self._plan = FramePlan(
            sender.reader.format,
            num_tokens=source.num_tokens,
            num_held_tokens=target.num_held_tokens,
            max_frame_bytes=sender.config.max_frame_bytes,
        )
        self._num_computed_tokens = 0
        self._layers = StoredLayers()
        self._first_token: FirstToken | None = None
        self._wake = asyncio.Event()
        self._num_bytes = 0
        self._num_hidden_bytes = 0
        self._started_at: float | None = None
        self._times = TransferTimes()
        self._posting: asyncio.Task[None] | None = None
        self._unsent: set[CacheFrame] = set()
        self._num_resends: dict[int, int] = {}
        name = f"kv-transfer-{source.attempt_id.hex()[:8]}"
        self._task = asyncio.create_task(self._run(), name=name)

    def blocks_ready(self, num_computed_tokens: int) -> None:
        """Tells that the KV of that many leading tokens is in the cache. Never waits, never raises.

        The step that wrote them must have ended.
        """
        self._num_computed_tokens = max(self._num_computed_tokens, num_computed_tokens)
        self._wake.set()

    def layers_ready(self, num_layers: int, stored: Stored = DONE) -> None:
        """Tells that the KV of all tokens is in the cache in that many leading layers. Never waits or raises.

        stored: what has to happen first, on a device that is not done yet.
        """
        self._layers.add(num_layers, stored)
        self._wake.set()

    async def commit(self, first_token: FirstToken) -> TransferOutcome:
        """All tokens are computed: sends the rest, commits, and waits for the outcome.

        Raises KvTransferFailed (stalled, or resent too often) or PeerLost.
        """
        self._first_token = first_token
        self._num_hidden_bytes = self._num_bytes
        self.blocks_ready(self.source.num_tokens)
        return await self.result()

    async def result(self) -> TransferOutcome:
        """Waits for the end of the transfer without asking for it; the errors of commit().

        Before the commit it comes only if the transfer failed or the receiver gave
        the lease up, which is noticed with the next frame.
        """
        # The wait must not cancel the task: stop() does, once, when the context is left.
        await asyncio.wait([self._task])
        return self._task.result()

    async def commit_with(self, first_token: asyncio.Future[FirstToken]) -> TransferOutcome:
        """Waits for the token to be sampled and commits with it, unless the transfer has ended by then."""
        both: list[asyncio.Future[Any]] = [self._task, first_token]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return self._task.result() if self._task.done() else await self.commit(first_token.result())

    async def stop(self) -> None:
        """Ends the transfer and waits until it no longer reads the cache; idempotent."""
        await _end(self._task)

    async def _run(self) -> TransferOutcome:
        target, source = self._target, self.source
        ticket = Ticket(
            lease_id=target.lease_id,
            attempt_id=source.attempt_id,
            incarnation=target.incarnation,
            format=self._sender.reader.format,
            traceparent=source.traceparent,
        )
        async with AsyncExitStack() as stack:
            # Last of all: until the writer has ended, frames may be read.
            stack.callback(lambda: self._release(list(self._unsent)))
            opening = stack.enter_async_context(self._sender.transport.open(ticket, target))
            try:
                writer = await self._in_time(opening, "open_s")
                # Ended before the writer is, whatever happens.
                stack.push_async_callback(self._stop_posting)
                return self._outcome(await self._send(writer))
            except AnsweredEarly as early:
                return self._outcome(early.outcome)

    def _outcome(self, outcome: Outcome) -> TransferOutcome:
        duration_s = 0.0 if self._started_at is None else self._now() - self._started_at
        # Waiting for slots is a part of prepare().
        self._times.prepare_s = max(0.0, self._times.prepare_s - self._times.wait_s)
        if isinstance(outcome, Committed):
            self._times.verify_s, self._times.convert_s = outcome.verify_s, outcome.convert_s
        return TransferOutcome(
            outcome=outcome,
            num_bytes=self._num_bytes,
            duration_s=duration_s,
            hidden_share=self._num_hidden_bytes / self._num_bytes if self._num_bytes else 0.0,
            times=self._times,
        )

    async def _send(self, writer: KvWriter) -> Outcome:
        while self._first_token is None or not self._plan.is_complete:
            await self._wake.wait()
            self._wake.clear()
            if self._posting is not None and self._posting.done():
                await self._posted()
            frames = self._plan.advance(self._num_computed_tokens, self._layers.num_layers)
            await self._send_frames(writer, frames)
        while True:
            await self._posted()
            self._times.wait_s = writer.wait_s
            commit = writer.commit(len(self._plan.frames), self._first_token)
            answer = await self._in_time(commit, "commit_s")
            if not isinstance(answer, Resend):
                return answer
            if not answer.frame_indices:
                raise KvTransferFailed(f"{self._target.worker} neither commits nor says what it lacks")
            await self._send_frames(writer, self._again(answer))

    async def _send_frames(self, writer: KvWriter, specs: Sequence[FrameSpec]) -> None:
        """Reads frames and hands them on; returns while the last of them may still be on their way."""
        if specs and self._started_at is None:
            self._started_at = self._now()
        num_sent = 0
        while num_sent < len(specs):
            frames = self._batch(specs[num_sent : num_sent + writer.max_batch])
            num_sent += len(frames)
            event = frames[0].stored.event
            # A step may take longer than any part of a transfer; waiting for it is no stall.
            if event is not None and self._sender.events is not None:
                await self._sender.events.fired(event)
            self._unsent.update(frames)
            prepared = await self._in_time(writer.prepare(frames), "prepare_s")
            await self._posted()
            self._posting = asyncio.create_task(self._post(writer, prepared, frames))
            # A failure must not wait for tokens that are still computed.
            self._posting.add_done_callback(lambda _: self._wake.set())

    def _batch(self, specs: Sequence[FrameSpec]) -> list[CacheFrame]:
        """The first of the frames, as many as wait for the same."""
        reader, ids, config = self._sender.reader, self.source.block_ids, self._sender.config
        stored = self._stored(specs[0])
        return [
            CacheFrame(reader, ids, spec, has_digest=config.has_digests, stored=stored)
            for spec in takewhile(lambda spec: self._stored(spec) == stored, specs)
        ]

    def _stored(self, spec: FrameSpec) -> Stored:
        """What has to happen before a frame is read, and where it lies a second time."""
        end = spec.first_block * self._sender.reader.format.block_size + spec.num_tokens
        if end <= self._num_computed_tokens:
            return self._layers.after()
        return self._layers.before(spec.first_layer + spec.num_layers)

    async def _post(self, writer: KvWriter, prepared: Any, frames: Sequence[CacheFrame]) -> None:
        try:
            await self._in_time(writer.post(prepared), "wire_s")
            self._num_bytes += sum(frame.num_bytes for frame in frames)
        finally:
            self._release(frames)

    def _release(self, frames: Sequence[CacheFrame]) -> None:
        self._unsent.difference_update(frames)
        for frame in frames:
            frame.release()

    async def _posted(self) -> None:
        """Waits until nothing is on its way; raises what went wrong there."""
        posting, self._posting = self._posting, None
        if posting is not None:
            try:
                await posting
            except asyncio.CancelledError:
                await _end(posting)
                raise

    async def _stop_posting(self) -> None:
        if self._posting is not None:
            await _end(self._posting)

    def _again(self, answer: Resend) -> list[FrameSpec]:
        frames = self._plan.frames
        for index in answer.frame_indices:
            if index >= len(frames):
                raise KvTransferFailed(f"{self._target.worker} asks for frame {index} of {len(frames)}")
            self._num_resends[index] = self._num_resends.get(index, 0) + 1
            if self._num_resends[index] > self._sender.config.max_resends:
                raise KvTransferFailed(
                    f"frame {index} did not reach {self._target.worker} intact in "
                    f"{self._num_resends[index]} attempts"
                )
        self._sender.num_resent_frames += len(answer.frame_indices)
        return [frames[index] for index in answer.frame_indices]

    async def _in_time(self, step: Awaitable[T], part: str) -> T:
        """One step of the transfer, within the stall deadline; its time counts as `part` of TransferTimes."""
        timeout_s = self._sender.config.stall_timeout_s
        began = self._now()
        try:
            async with asyncio.timeout(timeout_s):
                return await step
        except TimeoutError:
            raise KvTransferFailed(
                f"the transfer to {self._target.worker} made no progress for {timeout_s:g} s"
            ) from None
        finally:
            setattr(self._times, part, getattr(self._times, part) + self._now() - began)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits for its end, even if cancelled; what it raises is of no use any more."""
    cancelled: asyncio.CancelledError | None = None
    task.cancel()
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()
    if cancelled is not None:
        raise cancelled
