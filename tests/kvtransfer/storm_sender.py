"""One life of a sender in a storm: a tiny cache, the prompts in it, and a transport that misbehaves.

Owns what a prefill worker owns: which blocks are whose, and when they are free again. Knows no leases.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch

from baton.limits import blocks_needed
from engine.block_pool import BlockPool
from engine.kv_cache import KVCache
from engine.kv_staging import KvStaging
from engine.stored import DONE, Stored
from kvtransfer.contract import (
    Answer,
    FirstToken,
    KvTransport,
    KvWriter,
    OutgoingFrame,
    Ticket,
    TransferTarget,
)
from kvtransfer.outgoing import HostReader, Payload, Reader
from kvtransfer.sender import KvSender, SenderConfig
from kvtransfer.staged import StagedReader
from kvtransfer.wire import HEADER_BYTES, FrameSpec
from tests.kvtransfer.faults import FaultyTransport
from tests.kvtransfer.rig import make_cache
from tests.kvtransfer.staging import StagedPrompt
from tests.kvtransfer.storm_values import HEAD_DIM, HELD, MAX_TOKENS, NUM_HEADS, UNCOMPUTED, kv_of

BLOCK_SIZES = (4, 5, 16, 32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# More than all transfers at once can have in their hands: an event loop that reads must not wait.
NUM_BUFFERS = 512


def draw_cache(rng: random.Random, num_layers: int, num_prompts: int) -> KVCache:
    """A cache with room for about that many of the longest sequences."""
    block_size = rng.choice(BLOCK_SIZES)
    return make_cache(
        num_prompts * blocks_needed(MAX_TOKENS, block_size) + rng.randrange(3),
        block_size=block_size,
        dtype=rng.choice(DTYPES),
        layout=rng.choice(("HND", "NHD")),
        num_layers=num_layers,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
    )


class Prompt:
    """A sequence in a sender's blocks, computed up to num_computed tokens."""

    def __init__(self, cache: KVCache, block_ids: list[int], sequence: int, num_tokens: int) -> None:
        self.block_ids = block_ids
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_computed = 0
        self.shape = cache.shape
        self._cache = cache
        self._num_held = 0
        tokens = torch.arange(num_tokens)
        self._blocks = torch.tensor(block_ids)[tokens // cache.shape.block_size]
        self._slots = tokens % cache.shape.block_size

    def begin(self, num_held: int) -> None:
        """Another transfer: only what is computed is right, and of that not what the receiver holds."""
        self._num_held = num_held
        self._cache.logical[self.block_ids] = UNCOMPUTED
        self.store(self.num_computed)

    def store(self, end: int, layers: slice = slice(None)) -> None:
        """Computes the tokens up to `end`, in some layers."""
        first = 0 if end <= self.num_computed else self.num_computed
        rows = kv_of(self.sequence, first, end, self.shape.num_layers)[:, layers]
        if first < self._num_held:
            rows = rows.clone()
            rows[: self._num_held - first] = HELD
        where = (self._blocks[first:end], layers, slice(None), slice(None), self._slots[first:end])
        self._cache.logical[where] = rows.to(self._cache.logical.dtype)


class WatchedReader:
    """A Reader that notes when a block is read that no transfer has borrowed."""

    def __init__(self, inner: Reader, borrowed: set[int], complain: Callable[[str], None]) -> None:
        self.format = inner.format
        self.counters = inner.counters
        self.memory = inner.memory
        self._inner = inner
        self._borrowed = borrowed
        self._complain = complain

    def read(self, block_ids: Sequence[int], spec: FrameSpec, stored: Stored = DONE) -> Payload:
        ids = block_ids[spec.first_block : spec.first_block + spec.num_blocks]
        if not self._borrowed.issuperset(ids):
            self._complain(f"frame {spec.index} was read from blocks {ids}, which are not borrowed any more")
        return self._inner.read(block_ids, spec, stored)


class HostStream:
    """What a device's stream does, on the host."""

    @contextmanager
    def behind(self, event: object) -> Iterator[None]:
        yield


class SenderSide:
    """One incarnation of a sender. `died` is done when it is killed."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        rng: random.Random,
        *,
        num_layers: int,
        max_frame_bytes: int,
        complain: Callable[[str], None],
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.paused_until = -1.0
        self.cache = draw_cache(rng, num_layers, num_prompts=6)
        self.pool = BlockPool(self.cache.shape.num_blocks, self.cache.shape.block_size)
        self.borrowed: set[int] = set()
        host = HostReader(self.cache)
        # From a part of one block's layers per frame to several blocks.
        row_bytes = host.format.layer_block_bytes
        self.max_frame_bytes = min(max_frame_bytes, rng.randint(row_bytes, 6 * num_layers * row_bytes))
        self.staged: StagedReader | None = None
        if rng.random() < 0.5:
            self.staged = StagedReader(
                self.cache, self.max_frame_bytes, stream=HostStream(), num_buffers=NUM_BUFFERS
            )
        # One: prompts are computed at the same time here, and take it from one another.
        self._staging = KvStaging(self.cache.shape, MAX_TOKENS, "cpu", num_stages=1)
        self.reader = WatchedReader(self.staged or host, self.borrowed, complain)

    def equip(self, transport: StormTransport, stall_timeout_s: float) -> None:
        """Gives it its ways to the receivers."""
        config = SenderConfig(max_frame_bytes=self.max_frame_bytes, stall_timeout_s=stall_timeout_s)
        self.transport = transport
        self.sender = KvSender(self.reader, transport, config)

    def take(self, sequence: int, num_tokens: int) -> Prompt | None:
        """Blocks for a prompt, none of it computed; None if there are not enough now."""
        num_blocks = blocks_needed(num_tokens, self.pool.block_size)
        if not self.pool.can_allocate(num_blocks):
            return None
        return Prompt(self.cache, self.pool.allocate(num_blocks), sequence, num_tokens)

    def stage(self, prompt: Prompt) -> StagedPrompt | None:
        """The last step of a prompt stores its KV a second time; None where no reader looks there."""
        if self.staged is None:
            return None
        return StagedPrompt(
            self._staging, self.cache, prompt.block_ids, prompt.num_computed, prompt.num_tokens
        )

    @contextmanager
    def lending(self, prompt: Prompt) -> Iterator[None]:
        """Around the context of a transfer: once that is left, nothing may read these blocks."""
        self.borrowed.update(prompt.block_ids)
        try:
            yield
        finally:
            self.borrowed.difference_update(prompt.block_ids)

    def free(self, prompt: Prompt) -> None:
        """Nothing reads them any more: whoever does all the same sees no prompt."""
        self.cache.logical[prompt.block_ids] = UNCOMPUTED
        self.pool.release(prompt.block_ids)

    def leftovers(self) -> list[str]:
        """What is left over when every transfer has ended."""
        left = {
            "blocks": self.pool.num_blocks - self.pool.num_free,
            "transfers": self.sender.num_open_transfers,
            "buffers": NUM_BUFFERS - self.staged.num_free if self.staged else 0,
        }
        return [f"{self.name} has {count} {what} left" for what, count in left.items() if count]


class Faults(dict[int, str]):
    """The faults of one transfer by frame; tells which of them happened."""

    def __init__(self, faults: dict[int, str], happened: Callable[[str], None]) -> None:
        super().__init__(faults)
        self._happened = happened

    def get(self, key: int, default: Any = None) -> Any:
        fault = super().get(key, default)
        if fault is not None:
            self._happened(fault)
        return fault


Pause = Callable[[], Any]


class StormTransport:
    """A KvTransport whose writes have faults of their own, and take time if `pause` does."""

    def __init__(self, inner: KvTransport, pause: Pause, *, only_headers: bool = False) -> None:
        self.inner = inner
        self.faults: dict[bytes, tuple[Faults, int]] = {}
        self._pause = pause
        self._only_headers = only_headers

    @property
    def on_changed(self) -> Any:
        return self.inner.on_changed

    @asynccontextmanager
    async def open(self, ticket: Ticket, target: TransferTarget) -> AsyncIterator[KvWriter]:
        faults, bit = self.faults[ticket.attempt_id]
        faulty = FaultyTransport(self.inner, {}, bit % (8 * HEADER_BYTES) if self._only_headers else bit)
        faulty.faults = faults
        await self._pause()
        late: list[Any] = []
        try:
            async with faulty.open(ticket, target) as writer:
                yield SlowWriter(writer, self._pause, late)
        finally:
            # A frame that was sent late was read again, when its sender had released it.
            for frame in late:
                frame.release()


class SlowWriter:
    """A KvWriter every step of which takes time."""

    def __init__(self, inner: KvWriter, pause: Pause, frames: list[Any]) -> None:
        self._inner = inner
        self._pause = pause
        self._frames = frames

    @property
    def max_batch(self) -> int:
        return self._inner.max_batch

    @property
    def wait_s(self) -> float:
        return self._inner.wait_s

    async def prepare(self, frames: Sequence[OutgoingFrame]) -> Any:
        self._frames += frames
        await self._pause()
        return await self._inner.prepare(frames)

    async def post(self, prepared: Any) -> None:
        await self._pause()
        await self._inner.post(prepared)

    async def commit(self, num_frames: int, first_token: FirstToken) -> Answer:
        await self._pause()
        return await self._inner.commit(num_frames, first_token)
