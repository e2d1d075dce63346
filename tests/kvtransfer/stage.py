"""A receiver behind a real server on the loopback interface, and senders that reach it."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.identity import Identity
from baton.rpc_server import Registration, RpcServer
from baton.v1 import common_pb2
from kvtransfer.contract import Peer, TransferTarget
from kvtransfer.lease_table import Lease
from kvtransfer.outgoing import HostReader, Reader
from kvtransfer.sender import KvSender, KvSource, SenderConfig, TransferOutcome
from kvtransfer.sender_thread import SenderThread
from kvtransfer.slots import SlotTable
from kvtransfer.transports.arena import Arena
from kvtransfer.transports.client import ClientConfig, KvClient
from kvtransfer.transports.nixl import is_installed
from kvtransfer.transports.service import SERVICE_NAME, KvService
from tests.kvtransfer.rig import INCARNATION, TOKEN, Rig, target_of, until

FINGERPRINT = common_pb2.Fingerprint(weights_id="test")
SENDER = 0x99AABBCCDDEEFF00

_NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not is_installed(), reason="nixl is not installed"))
TRANSPORTS = ["grpc", "shm", _NIXL]
PLACING = ["shm", _NIXL]

# One block of the rig's cache, in 2 layers, has 2 x 2 x 3 heads x 16 tokens x 5 x 4 bytes: 3,840.
SMALL_BYTES, SMALL_SLOT = 4000, 4096
SMALL = SenderConfig(max_frame_bytes=SMALL_BYTES)
# With a head dim of 2,048 one block of one layer has 786,432 bytes.
LARGE_DIM, LARGE_SLOT = 2048, 1 << 20


def identity(name: str, incarnation: int, fingerprint: common_pb2.Fingerprint = FINGERPRINT) -> Identity:
    return Identity(
        name=name, role=common_pb2.ROLE_UNSPECIFIED, incarnation=incarnation, fingerprint=fingerprint
    )


@asynccontextmanager
async def nothing_left(kind: str) -> AsyncIterator[None]:
    """No task and no thread of that kind outlives the block."""
    before = {*asyncio.all_tasks(), *threading.enumerate()}

    def left() -> set[str]:
        # Not ours: gRPC's server leaves a task behind, and a proxy ends its own.
        others = ("AioServer", "TcpProxy")
        tasks = [task for task in asyncio.all_tasks() if not any(name in str(task) for name in others)]
        threads = [thread for thread in threading.enumerate() if thread.name.startswith(kind)]
        return {str(one) for one in [*tasks, *threads] if one not in before}

    yield
    # Turns are counted, not seconds: a machine that stands still for a while has had one turn. A
    # pause, not a spin: the threads need the interpreter in order to end.
    for _ in range(1000):
        if not left():
            return
        await asyncio.sleep(0.01)
    frames = sys._current_frames()
    stacks = [
        "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threading.enumerate()
        if thread.name.startswith(kind) and thread.ident in frames
    ]
    pytest.fail("\n".join([f"left behind: {left()}", *stacks]))


@dataclass(slots=True, eq=False)
class Receiving:
    """A receiver that can be paired with."""

    rig: Rig
    service: KvService
    server: RpcServer
    arena: Arena | None
    peer: Peer

    @property
    def slots(self) -> SlotTable:
        assert self.arena is not None
        return self.arena.slots

    def slot_counts(self) -> tuple[int, int, int, int]:
        """Free, held, quarantined and retired slots."""
        slots = self.slots
        return slots.num_free, slots.num_held, slots.num_quarantined, slots.num_retired


@asynccontextmanager
async def receiving(
    rig: Rig,
    folder: Path,
    *,
    incarnation: int = INCARNATION,
    num_slots: int = 32,
    slot_bytes: int = SMALL_SLOT,
    max_per_write: int = 16,
    port: int = 0,
    linger_s: float = 5.0,
    fingerprint: common_pb2.Fingerprint = FINGERPRINT,
    kind: type[KvService] = KvService,
) -> AsyncIterator[Receiving]:
    """At the end no write is open, no slot is held, and none is lost."""
    arena = None
    if num_slots:
        arena = Arena(
            num_slots,
            slot_bytes,
            folder=folder,
            rng=random.Random(incarnation),
            name=f"decode-0-{incarnation:x}",
            max_per_write=max_per_write,
        )
    service = kind(rig.receiver, identity("decode-0", incarnation, fingerprint), arena, linger_s=linger_s)
    async with nothing_left("kv-receiver"):
        registration = Registration(name=SERVICE_NAME, add=service.add_to)
        async with await RpcServer.start([registration], port=port) as server:
            peer = Peer(worker="decode-0", incarnation=incarnation, address=server.address)
            yield Receiving(rig, service, server, arena, peer)
        await until(lambda: rig.receiver.num_open_writes == 0)
    if arena is not None:
        slots = arena.slots
        assert slots.num_held == 0
        assert slots.num_free + slots.num_quarantined + slots.num_retired == num_slots
        arena.close()


@asynccontextmanager
async def sending(
    rig: Rig,
    folder: Path,
    transport: str,
    *,
    incarnation: int = SENDER,
    fingerprint: common_pb2.Fingerprint = FINGERPRINT,
    max_frame_bytes: int = SMALL_BYTES,
    has_digests: bool = True,
    reader: Reader | None = None,
) -> AsyncIterator[KvClient]:
    """A client that is not paired with anybody yet."""
    reader = reader or HostReader(rig.source)
    async with nothing_left("kv-"):
        thread = SenderThread()
        client = KvClient(
            identity("prefill-0", incarnation, fingerprint),
            reader.format,
            offload=thread,
            memory=reader.memory,
            config=ClientConfig(
                transport=transport,
                shm_folder=folder,
                max_frame_bytes=max_frame_bytes,
                has_digests=has_digests,
            ),
        )
        try:
            yield client
        finally:
            await client.close()
            thread.close()


@dataclass(slots=True, eq=False)
class Stage:
    """Both sides, paired."""

    rig: Rig
    receiving: Receiving
    client: KvClient

    @property
    def slots(self) -> SlotTable:
        return self.receiving.slots

    def sender(self, config: SenderConfig = SMALL) -> KvSender:
        return self.rig.sender(self.client, config)

    async def until_idle(self) -> None:
        """No write is open and no slot is held."""
        await until(lambda: self.rig.receiver.num_open_writes == self.slots.num_held == 0)

    async def until_all_free(self) -> None:
        """Every slot can be granted again."""
        async with asyncio.timeout(1):
            await until(lambda: self.slots.num_free == self.slots.num_slots)


@asynccontextmanager
async def staged(
    rig: Rig,
    folder: Path,
    transport: str,
    *,
    num_slots: int = 32,
    slot_bytes: int = SMALL_SLOT,
    max_frame_bytes: int = SMALL_BYTES,
    kind: type[KvService] = KvService,
) -> AsyncIterator[Stage]:
    """A receiver and one sender, paired over that transport."""
    async with (
        receiving(rig, folder, num_slots=num_slots, slot_bytes=slot_bytes, kind=kind) as receiver,
        sending(rig, folder, transport, max_frame_bytes=max_frame_bytes) as client,
    ):
        assert (await client.pair(receiver.peer)).transport == transport
        yield Stage(rig, receiver, client)


def now() -> float:
    return asyncio.get_running_loop().time()


def reserve(rig: Rig, attempt_id: bytes = b"a", num_tokens: int = 70) -> Lease[str]:
    return rig.reserve(attempt_id, num_tokens, now=now())


async def send(
    sender: KvSender,
    rig: Rig,
    lease: Lease[str],
    *,
    source: KvSource | None = None,
    target: TransferTarget | None = None,
) -> TransferOutcome:
    async with sender.transfer(source or rig.kv_source(lease), target or target_of(lease)) as transfer:
        return await asyncio.wait_for(transfer.commit(TOKEN), 10)
