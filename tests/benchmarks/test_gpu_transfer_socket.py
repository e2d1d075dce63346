from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from baton.errors import IncompatiblePeer, PeerLost
from benchmarks.on_gpu.transfer_server import SocketServer
from benchmarks.on_gpu.transfer_socket import SocketTransport
from kvtransfer.contract import Committed, Gone, GoneReason, Peer
from kvtransfer.lease_table import Lease
from kvtransfer.outgoing import HostReader
from kvtransfer.sender import SenderConfig, Transfer
from tests.kvtransfer.faults import FaultyTransport
from tests.kvtransfer.rig import INCARNATION, TOKEN, Rig, fill, make_cache, make_rig, target_of, until

T = TypeVar("T")

# Of blocks of 16 tokens: five, the last of them cut.
NUM_TOKENS = 70
# A block of a layer, so that there are ten frames.
CONFIG = SenderConfig(max_frame_bytes=1, stall_timeout_s=5.0)


@dataclass
class Line:
    """A rig with a socket between its two sides."""

    rig: Rig
    server: SocketServer
    transport: SocketTransport
    peer: Peer
    ended: list[bytes]

    def transfer(self, lease: Lease[str]) -> AbstractAsyncContextManager[Transfer]:
        """Of KV that is computed."""
        sender = self.rig.sender(self.transport, CONFIG)
        return sender.transfer(self.rig.kv_source(lease), target_of(lease))


async def at_once(function: Callable[[], T]) -> T:
    """An Offload."""
    return function()


@asynccontextmanager
async def line_in(folder: Path) -> AsyncIterator[Line]:
    rig = make_rig()
    fill(rig.source)
    ended: list[bytes] = []
    server = SocketServer(rig.receiver, folder / "kv", lambda attempt_id, _failure: ended.append(attempt_id))
    transport = SocketTransport(HostReader(rig.source).format, at_once)
    peer = Peer(worker="decode-0", incarnation=INCARNATION, address=server.address)
    async with asyncio.timeout(20):
        try:
            yield Line(rig, server, transport, peer, ended)
        finally:
            await server.close()


async def test_kv_arrives_whole_and_the_write_ends(tmp_path: Path) -> None:
    async with line_in(tmp_path) as line:
        rig = line.rig
        lease = rig.reserve(b"a", NUM_TOKENS, asyncio.get_running_loop().time())
        assert (await line.transport.pair(line.peer)).transport == "socket"

        async with rig.sender(line.transport, CONFIG).transfer(
            rig.kv_source(lease), target_of(lease)
        ) as sent:
            outcome = await sent.commit(TOKEN)

        assert outcome.outcome == Committed()
        assert rig.committed == [("a", TOKEN)]
        assert rig.has_all(lease, lease.block_ids)
        assert len(line.server.arrivals[b"a"]) == 10
        assert sum(num_bytes for _, num_bytes in line.server.arrivals[b"a"]) == outcome.num_bytes


async def test_frames_that_do_not_arrive_are_sent_again(tmp_path: Path) -> None:
    async with line_in(tmp_path) as line:
        rig = line.rig
        lease = rig.reserve(b"a", NUM_TOKENS, asyncio.get_running_loop().time())
        await line.transport.pair(line.peer)
        faulty = FaultyTransport(line.transport, {2: "drop", 7: "corrupt"})
        sender = rig.sender(faulty, CONFIG)

        async with sender.transfer(rig.kv_source(lease), target_of(lease)) as sent:
            outcome = await sent.commit(TOKEN)

        assert outcome.outcome == Committed()
        assert sender.num_resent_frames == 2
        assert rig.has_all(lease, lease.block_ids)


async def test_a_lease_that_is_over_is_answered_before_any_frame(tmp_path: Path) -> None:
    async with line_in(tmp_path) as line:
        rig, now = line.rig, asyncio.get_running_loop().time()
        lease = rig.reserve(b"a", NUM_TOKENS, now)
        rig.leases.abort_if_uncommitted(b"a", now)
        await line.transport.pair(line.peer)

        async with rig.sender(line.transport, CONFIG).transfer(
            rig.kv_source(lease), target_of(lease)
        ) as sent:
            outcome = await sent.commit(TOKEN)

        assert outcome.outcome == Gone(GoneReason.CANCELLED)
        assert line.server.arrivals == {}


async def test_a_lease_that_ends_under_its_write_is_answered_to_the_next_frame(tmp_path: Path) -> None:
    async with line_in(tmp_path) as line:
        rig, now = line.rig, asyncio.get_running_loop().time()
        lease = rig.reserve(b"a", NUM_TOKENS, now)
        await line.transport.pair(line.peer)
        line.server.hold_after = 3

        async with rig.sender(line.transport, CONFIG).transfer(
            rig.kv_source(lease), target_of(lease)
        ) as sent:
            committing = asyncio.ensure_future(sent.commit(TOKEN))
            await line.server.arrived(b"a", 3)
            rig.leases.abort_if_uncommitted(b"a", now)
            line.server.release()
            outcome = await committing

        assert outcome.outcome == Gone(GoneReason.CANCELLED)
        assert len(line.server.arrivals[b"a"]) == 3


async def test_a_receiver_that_goes_is_lost_and_an_unknown_one_is_not_there(tmp_path: Path) -> None:
    async with line_in(tmp_path) as line:
        rig = line.rig
        lease = rig.reserve(b"a", NUM_TOKENS, asyncio.get_running_loop().time())
        sender = rig.sender(line.transport, CONFIG)

        async with sender.transfer(rig.kv_source(lease), target_of(lease)) as sent:
            with pytest.raises(PeerLost, match="cannot connect to decode-0"):
                await sent.commit(TOKEN)
        await line.transport.pair(line.peer)
        line.server.hold_after = 3
        async with sender.transfer(rig.kv_source(lease), target_of(lease)) as sent:
            committing = asyncio.ensure_future(sent.commit(TOKEN))
            await line.server.arrived(b"a", 3)
            await line.server.close()
            with pytest.raises(PeerLost, match="ended without an answer"):
                await committing

        assert sender.num_open_transfers == 0
        # The receiver's side has heard of the end, and the lease waits for another write.
        assert line.ended == [b"a"]
        assert rig.receiver.num_open_writes == 0


async def test_a_sender_that_goes_ends_its_write(tmp_path: Path) -> None:
    async with line_in(tmp_path) as line:
        rig = line.rig
        lease = rig.reserve(b"a", NUM_TOKENS, asyncio.get_running_loop().time())
        await line.transport.pair(line.peer)

        async with rig.sender(line.transport, CONFIG).transfer(
            rig.kv_source(lease), target_of(lease)
        ) as sent:
            sent.blocks_ready(32)
            await line.server.arrived(b"a", 4)
        await until(lambda: bool(line.ended))

        assert line.ended == [b"a"]
        assert rig.receiver.num_open_writes == 0
        assert rig.committed == []


async def test_another_model_is_refused_by_its_field(tmp_path: Path) -> None:
    async with line_in(tmp_path) as line:
        other = SocketTransport(HostReader(make_cache(num_layers=3)).format, at_once)

        with pytest.raises(IncompatiblePeer, match="num_layers is 3") as refused:
            await other.pair(line.peer)

        assert refused.value.field == "num_layers"
