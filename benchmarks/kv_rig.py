"""Two processes with a cache each, and transfers between them, for the benchmark of the transfer layer.

Owns the receiving process, its leases, and the connections to it. What is measured, and against what, is
benchmarks/kv_throughput.py's and benchmarks/kv_hidden.py's business.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from baton.identity import Identity
from baton.limits import blocks_needed
from baton.rpc_server import Registration, RpcServer
from baton.v1 import common_pb2
from benchmarks.child import Child
from engine.block_pool import BlockPool
from engine.kv_cache import CacheShape, KVCache
from kvtransfer.contract import Committed, FirstToken, GoneReason, KvFormat, Peer, TransferTarget
from kvtransfer.lease_table import Lease, LeaseTable
from kvtransfer.outgoing import HostReader
from kvtransfer.receiver import KvReceiver
from kvtransfer.scatter import BlockWriter
from kvtransfer.sender import KvSender, KvSource, SenderConfig, TransferOutcome
from kvtransfer.sender_thread import SenderThread
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.client import ClientConfig, KvClient
from kvtransfer.transports.service import SERVICE_NAME, KvService
from kvtransfer.wire import Frame

TOKEN = FirstToken(token_id=1, logprob=None, start_index=0)
ARENA_BYTES = 64 << 20
SHM_FOLDER = Path("/dev/shm")
LEASE_S = 600.0
STALL_S = 60.0

_numbers = itertools.count()


class ReceiverProcess:
    """A decode worker's transfer layer in a process of its own, asked over a pipe for leases."""

    def __init__(self, shape: CacheShape, *, has_digests: bool = True) -> None:
        name = f"decode-{next(_numbers)}"
        self._child = Child(_receive, name, shape, has_digests)
        self.peer: Peer = self._child.hear()
        self._attempts = itertools.count(1)

    def reserve(self, num_tokens: int) -> tuple[bytes, TransferTarget]:
        """A new attempt, and a lease on that many tokens for it."""
        attempt_id = next(self._attempts).to_bytes(16, "big")
        lease_id: bytes = self._child.ask((attempt_id, num_tokens))
        worker, incarnation = self.peer.worker, self.peer.incarnation
        return attempt_id, TransferTarget(lease_id=lease_id, worker=worker, incarnation=incarnation)

    def arrivals(self) -> list[tuple[float, int]]:
        """(time.monotonic(), bytes) of every frame stored since the last lease was granted."""
        arrived: list[tuple[float, int]] = self._child.ask(None)
        return arrived

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


def _receive(name: str, shape: CacheShape, has_digests: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve(_Reception(name, shape, has_digests), pipe))


async def _serve(reception: _Reception, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def answer() -> None:
        try:
            asked = pipe.recv()
        except EOFError:
            ended.set()
            return
        pipe.send(reception.writer.arrived if asked is None else reception.reserve(*asked))

    registration = Registration(name=SERVICE_NAME, add=reception.service.add_to)
    async with await RpcServer.start([registration]) as server:
        incarnation = reception.identity.incarnation
        pipe.send(Peer(worker=reception.identity.name, incarnation=incarnation, address=server.address))
        loop.add_reader(pipe.fileno(), answer)
        await ended.wait()
        loop.remove_reader(pipe.fileno())
    reception.arena.close()


class _Reception:
    """The receiver, its cache, and leases that end as soon as they are committed."""

    def __init__(self, name: str, shape: CacheShape, has_digests: bool) -> None:
        rng = random.SystemRandom()
        cache = KVCache(shape)
        self._pool = BlockPool(shape.num_blocks, shape.block_size)
        self._leases: LeaseTable[None] = LeaseTable(self._pool, rng=rng, ttl_s=LEASE_S)
        self.identity = identity(name, common_pb2.ROLE_DECODE)
        self.writer = _TimedWriter(cache)
        receiver = KvReceiver(
            self._leases,
            cache,
            self.identity.incarnation,
            on_committed=self._committed,
            on_lost=lambda *_: None,
            clock=time.monotonic,
            has_digests=has_digests,
        )
        receiver.block_writer = self.writer
        arena = Arena.of_size(ARENA_BYTES, folder=SHM_FOLDER, rng=rng, name=name)
        assert arena is not None
        self.arena = arena
        self.service = KvService(receiver, self.identity, arena)

    def reserve(self, attempt_id: bytes, num_tokens: int) -> bytes:
        """A lease's ticket."""
        self.writer.arrived.clear()
        num_blocks = blocks_needed(num_tokens, self._pool.block_size)
        now = asyncio.get_running_loop().time()
        lease = self._leases.reserve(attempt_id, None, num_blocks=num_blocks, num_tokens=num_tokens, now=now)
        assert isinstance(lease, Lease), lease
        return lease.lease_id

    def _committed(self, lease: Lease[None], _token: FirstToken) -> None:
        self._leases.release(lease.attempt_id, GoneReason.CANCELLED, asyncio.get_running_loop().time())
        self._pool.release(lease.block_ids)


class _TimedWriter(BlockWriter):
    """Notes when frames have been stored. arrived: (time.monotonic(), bytes) of each."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self.arrived: list[tuple[float, int]] = []

    def write(
        self, fmt: KvFormat, block_ids: Sequence[int], frame: Frame, *, num_held_tokens: int = 0
    ) -> int:
        """Stores a frame."""
        saturated = super().write(fmt, block_ids, frame, num_held_tokens=num_held_tokens)
        self.arrived.append((time.monotonic(), frame.payload.nbytes))
        return saturated


class SendingSide:
    """A prefill worker's transfer layer in this process, connected to one receiver; close() it.

    transport: the one that pairing must come to.
    """

    def __init__(
        self, cache: KVCache, receiver: ReceiverProcess, transport: str, *, has_digests: bool = True
    ) -> None:
        self.transport = transport
        self.receiver = receiver
        self._shape = cache.shape
        self._rng = random.Random(0)
        reader, self._thread = HostReader(cache), SenderThread()
        config = ClientConfig(transport=transport, has_digests=has_digests)
        self._client = KvClient(
            identity(f"prefill-{next(_numbers)}", common_pb2.ROLE_PREFILL),
            reader.format,
            offload=self._thread,
            memory=reader.memory,
            config=config,
        )
        sending = SenderConfig(has_digests=has_digests, stall_timeout_s=STALL_S)
        self.sender = KvSender(reader, self._client, sending)

    async def pair(self) -> None:
        """Connects; raises RuntimeError if the transport cannot be used here."""
        pairing = await self._client.pair(self.receiver.peer)
        if pairing.transport != self.transport:
            raise RuntimeError(f"no {self.transport} on this machine: {pairing.note}")

    async def send(self, num_tokens: int) -> TransferOutcome:
        """One transfer of a sequence that is computed already, from blocks in no particular order."""
        attempt_id, target = self.receiver.reserve(num_tokens)
        num_blocks = blocks_needed(num_tokens, self._shape.block_size)
        block_ids = self._rng.sample(range(self._shape.num_blocks), num_blocks)
        source = KvSource(attempt_id=attempt_id, block_ids=block_ids, num_tokens=num_tokens)
        async with self.sender.transfer(source, target) as transfer:
            result = await transfer.commit(TOKEN)
        assert result.outcome == Committed(), result
        return result

    async def close(self) -> None:
        """Ends the connection and the thread."""
        await self._client.close()
        self._thread.close()


def identity(name: str, role: common_pb2.Role.ValueType) -> Identity:
    """A worker's; all of a benchmark serve the same model."""
    fingerprint = common_pb2.Fingerprint(weights_id="benchmark")
    return Identity.draw(name, role, fingerprint, random.SystemRandom())


def random_cache(shape: CacheShape) -> KVCache:
    """A cache full of finite values."""
    cache = KVCache(shape)
    cache.data.normal_()
    return cache
