"""Two caches, a lease table and a receiver, wired for tests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from baton.limits import blocks_needed
from engine.block_pool import BlockPool
from engine.kv_cache import CacheShape, KVCache
from kvtransfer.contract import FirstToken, KvFormat, KvTransport, TransferTarget
from kvtransfer.lease_table import Lease, LeaseTable
from kvtransfer.outgoing import HostReader
from kvtransfer.plan import MAX_FRAME_BYTES, FramePlan
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender, KvSource, SenderConfig
from kvtransfer.wire import FrameSpec
from tests.fakes import KvNetwork

INCARNATION = 0x1122334455667788
TOKEN = FirstToken(token_id=7, logprob=-0.25, start_index=0)


def plan_frames(
    fmt: KvFormat,
    *,
    num_tokens: int,
    num_held_tokens: int = 0,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> list[FrameSpec]:
    """All frames of a sequence that is already computed."""
    plan = FramePlan(
        fmt, num_tokens=num_tokens, num_held_tokens=num_held_tokens, max_frame_bytes=max_frame_bytes
    )
    return plan.advance(num_tokens)


def make_cache(
    num_blocks: int = 8,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "HND",
    num_layers: int = 2,
    num_kv_heads: int = 3,
    head_dim: int = 5,
) -> KVCache:
    shape = CacheShape(
        num_blocks=num_blocks,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
        layout=layout,
    )
    return KVCache(shape)


def fill(cache: KVCache) -> None:
    """A distinct small integer in every element, exact in bfloat16 up to 256 and in float32 always."""
    count = cache.logical.numel()
    values = torch.arange(count, dtype=torch.float32) % 251 + 1
    cache.logical.copy_(values.view(cache.logical.shape).to(cache.logical.dtype))


@dataclass
class Rig:
    """A prefill side (source) and a decode side (everything else)."""

    source: KVCache
    cache: KVCache
    pool: BlockPool
    leases: LeaseTable[str]
    receiver: KvReceiver[str]
    committed: list[tuple[str, FirstToken]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    source_blocks: tuple[int, ...] = (5, 2, 0, 7, 3, 6, 1, 4)

    def reserve(self, attempt_id: bytes, num_tokens: int, now: float = 0.0) -> Lease[str]:
        num_blocks = blocks_needed(num_tokens, self.pool.block_size)
        lease = self.leases.reserve(
            attempt_id, attempt_id.decode(), num_blocks=num_blocks, num_tokens=num_tokens, now=now
        )
        assert isinstance(lease, Lease)
        return lease

    def kv_source(self, lease: Lease[str]) -> KvSource:
        num_blocks = blocks_needed(lease.num_tokens, self.source.shape.block_size)
        return KvSource(
            attempt_id=lease.attempt_id,
            block_ids=self.source_blocks[:num_blocks],
            num_tokens=lease.num_tokens,
        )

    def tokens_of(
        self, cache: KVCache, block_ids: list[int] | tuple[int, ...], num_tokens: int
    ) -> list[object]:
        """KV by token, each [L, 2, H, D] as a list."""
        size = cache.shape.block_size
        return [
            cache.logical[block_ids[token // size], :, :, :, token % size].float().tolist()
            for token in range(num_tokens)
        ]

    def has_all(self, lease: Lease[str], block_ids: list[int]) -> bool:
        sent = self.tokens_of(self.source, self.source_blocks, lease.num_tokens)
        return self.tokens_of(self.cache, block_ids, lease.num_tokens) == sent

    def has_frames(self, num_frames: int) -> bool:
        return self.receiver.counters["frames"] >= num_frames

    def network(self) -> KvNetwork:
        """A transport to the receiver, without a network."""
        return KvNetwork.to(self.receiver, INCARNATION, now=lambda: 0.0)

    def sender(self, transport: KvTransport, config: SenderConfig | None = None) -> KvSender:
        return KvSender(HostReader(self.source), transport, config)

    def ledger(self) -> dict[str, int]:
        return {
            "free": self.pool.num_free,
            "leases": self.leases.num_leases,
            "reserved": self.leases.num_reserved_blocks,
            "writes": self.receiver.num_open_writes,
        }


def make_rig(
    source: KVCache | None = None,
    cache: KVCache | None = None,
    *,
    incarnation: int = INCARNATION,
    **options: int,
) -> Rig:
    source = source or make_cache()
    cache = cache or make_cache()
    fill(source)
    cache.logical.fill_(-1)
    pool = BlockPool(cache.shape.num_blocks, cache.shape.block_size)
    leases: LeaseTable[str] = LeaseTable(pool, rng=random.Random(1))
    committed: list[tuple[str, FirstToken]] = []
    lost: list[tuple[str, str]] = []
    receiver = KvReceiver(
        leases,
        cache,
        incarnation,
        clock=time.monotonic,
        on_committed=lambda lease, token: committed.append((lease.payload, token)),
        on_lost=lambda lease, reason: lost.append((lease.payload, reason.name)),
        **options,
    )
    return Rig(source, cache, pool, leases, receiver, committed, lost)


def target_of(lease: Lease[str], incarnation: int = INCARNATION) -> TransferTarget:
    return TransferTarget(
        lease_id=lease.lease_id,
        worker="decode-0",
        incarnation=incarnation,
        num_held_tokens=lease.num_held_tokens,
    )


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds; fails after 5 s."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)
