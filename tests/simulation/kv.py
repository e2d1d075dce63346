"""The KV transport over the simulated network: the real client, the real writer and the real bytes.

Owns what happens to frames on the way: lost, doubled, cut short or altered; and what stands for the
memory of another process.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

from baton.errors import PeerLost, Unavailable
from baton.identity import Identity
from kvtransfer.contract import Answer, FirstToken, KvFormat, OutgoingFrame, Ticket, TransferTarget
from kvtransfer.transports.client import ClientConfig, KvClient
from kvtransfer.transports.writer import GrpcKvWriter
from kvtransfer.wire import HEADER_BYTES
from tests.simulation.arena import MemoryArena, MemoryCarrier, Wire

Damage = Callable[[bytes], bytes]


class SentFrame:
    """A frame of an attempt, and what happens to it behind its digest. damage: of header and payload."""

    def __init__(self, frame: OutgoingFrame, attempt_id: bytes, damage: Damage | None) -> None:
        self.frame = frame
        self.attempt_id = attempt_id
        self._damage = damage

    @property
    def num_bytes(self) -> int:
        return sum(run.nbytes for run in self.runs())

    def header(self) -> bytes:
        return self.frame.header() if self._damage is None else self._damaged[:HEADER_BYTES]

    def runs(self) -> Sequence[memoryview]:
        return self.frame.runs() if self._damage is None else [memoryview(self._damaged)[HEADER_BYTES:]]

    @cached_property
    def _damaged(self) -> bytes:
        assert self._damage is not None
        return self._damage(self.frame.header() + b"".join(self.frame.runs()))


class FrameFaults:
    """What links do to frames. share: of the frames, by (sender, receiver)."""

    def __init__(self, rng: random.Random) -> None:
        self.share: dict[tuple[str, str], float] = {}
        self._rng = rng

    def draw(self, link: tuple[str, str], num_bytes: int) -> list[Damage | None]:
        """What happens to each copy of a frame that arrives, header included in its bytes."""
        share = self.share.get(link, 0.0)
        if not share or self._rng.random() >= share:
            return [None]
        kind = self._rng.choice(("drop", "duplicate", "truncate", "flip", "flip"))
        if kind == "drop":
            return []
        if kind == "duplicate":
            return [None, None]
        if kind == "truncate":
            end = self._rng.randrange(1, num_bytes)
            return [lambda data: data[:end]]
        bit = self._rng.randrange(8 * num_bytes)
        return [lambda data: _flipped(data, bit)]


def _flipped(data: bytes, bit: int) -> bytes:
    altered = bytearray(data)
    altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


class SimKvWriter:
    """A KvWriter on a link that may damage frames.

    damages: what happens to a frame of so many bytes. posted: told of each batch that is out.
    """

    def __init__(
        self,
        inner: GrpcKvWriter,
        attempt_id: bytes,
        damages: Callable[[int], list[Damage | None]],
        posted: Callable[[Sequence[SentFrame]], None],
    ) -> None:
        self._inner = inner
        self._attempt_id = attempt_id
        self._damages = damages
        self._posted = posted

    @property
    def max_batch(self) -> int:
        return self._inner.max_batch

    @property
    def wait_s(self) -> float:
        return self._inner.wait_s

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> tuple[Sequence[SentFrame], Any]:
        arriving = [
            SentFrame(frame, self._attempt_id, damage)
            for frame in frames
            for damage in self._damages(HEADER_BYTES + frame.num_bytes)
        ]
        if self._inner.is_placed:
            # There are no more slots than that: one frame takes the place of another, which is lost.
            arriving = arriving[: self._inner.max_batch]
        return arriving, await self._inner.prepare(arriving)

    async def post(self, prepared: tuple[Sequence[SentFrame], Any]) -> None:
        frames, inner = prepared
        await self._inner.post(inner)
        self._posted(frames)

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        return await self._inner.commit(num_frames, first_token)


class SimKvClient(KvClient):
    """The KvTransport of one process.

    faults: what links do to frames. segment: memory by its nonce; None where it is another host's.
    posted: told of each batch of frames that is out. wire: into that memory.
    """

    def __init__(
        self,
        identity: Identity,
        fmt: KvFormat,
        *,
        faults: FrameFaults,
        segment: Callable[[bytes], MemoryArena | None],
        posted: Callable[[Sequence[SentFrame]], None],
        wire: Wire,
        config: ClientConfig,
        offload: Any,
        dial: Any,
    ) -> None:
        super().__init__(identity, fmt, offload=offload, config=config, dial=dial)
        self._faults = faults
        self._segment = segment
        self._posted = posted
        self._wire = wire

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[Any]:
        """Opens a write."""
        link = (self._identity.name, target.worker)
        async with super().open(ticket, target) as writer:
            yield SimKvWriter(
                writer,
                ticket.attempt_id,
                lambda num_bytes: self._faults.draw(link, num_bytes),
                self._posted,
            )

    async def _carrier(self, link: Any, name: str) -> Any:
        """Attaches to memory as to a segment; the rest is the product's."""
        offer = await self._introduce(link, name)
        if not offer.HasField("shm"):
            raise Unavailable(offer.note)
        largest = max(self._config.max_frame_bytes, self._format.layer_block_bytes)
        if largest > offer.slot_bytes:
            raise Unavailable(f"frames may have {largest} bytes")
        arena = self._segment(offer.shm.nonce)
        if arena is None:
            raise PeerLost("the two are not on one host")
        return MemoryCarrier(arena, self._wire)
