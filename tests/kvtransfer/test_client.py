"""Which transport is chosen, and what happens when one fails in use, or its receiver is dropped."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError, PeerLost
from baton.v1.kv_transfer_service_pb2 import PairRequest, PairResponse
from benchmarks.chaos.tcp_proxy import TcpProxy
from kvtransfer.contract import Committed, OutgoingFrame, Pairing, Peer, Ticket
from kvtransfer.slots import Sender
from kvtransfer.transports import client as client_module
from kvtransfer.transports import nixl
from kvtransfer.transports import writer as writer_module
from kvtransfer.transports.client import ClientConfig
from kvtransfer.transports.grpc_codec import encode_open
from kvtransfer.transports.nixl import NixlCarrier, is_installed
from kvtransfer.transports.service import KvService
from kvtransfer.transports.shm import ShmCarrier
from tests.kvtransfer.rig import INCARNATION, TOKEN, make_cache, make_rig, target_of, until
from tests.kvtransfer.stage import (
    PLACING,
    SENDER,
    SMALL,
    TRANSPORTS,
    receiving,
    reserve,
    send,
    sending,
    staged,
)

torch.set_num_threads(1)

needs_nixl = pytest.mark.skipif(not is_installed(), reason="nixl is not installed")


def fallbacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about falling back."""
    return [record.getMessage() for record in caplog.records if "KV goes over gRPC" in record.getMessage()]


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were not there."""
    monkeypatch.setattr(nixl, "is_installed", lambda: False)
    # Makes every import of it fail.
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)


async def test_auto_takes_shared_memory_on_one_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, "auto") as client:
        assert client.transport_to(INCARNATION) is None
        assert await client.pair(receiver.peer) == Pairing(transport="shm")
        assert await client.pair(receiver.peer) == Pairing(transport="shm")
        assert client.transport_to(INCARNATION) == "shm"
        assert client.counters == {}
        await client.part(INCARNATION)
        assert client.transport_to(INCARNATION) is None
    assert fallbacks(caplog) == []


@needs_nixl
async def test_auto_takes_nixl_where_the_receivers_memory_is_another_hosts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    async with receiving(rig, there) as receiver, sending(rig, here, "auto") as client:
        pairing = await client.pair(receiver.peer)
        assert pairing.transport == "nixl"
        assert pairing.note == f"no shm: its segment does not lie in {here}"
        assert client.counters == {}
        lease = reserve(rig)
        assert (await send(rig.sender(client, SMALL), rig, lease)).outcome == Committed()
        assert rig.has_all(lease, lease.block_ids)
    assert fallbacks(caplog) == []


async def test_auto_goes_over_grpc_where_nothing_else_works_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, without_nixl: None
) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path / "other", "auto") as client:
        pairing = await client.pair(receiver.peer)
        assert pairing == Pairing(
            transport="grpc", note=f"no shm: its segment does not lie in {tmp_path / 'other'}"
        )
        await client.pair(receiver.peer)
        assert client.counters == {"transport_fallbacks": 1}
        lease = reserve(rig)
        assert (await send(rig.sender(client, SMALL), rig, lease)).outcome == Committed()
        # Its writes want no slots, so none is missing.
        assert client.counters == {"transport_fallbacks": 1}
    (line,) = fallbacks(caplog)
    assert "decode-0" in line
    assert "no shm" in line


@pytest.mark.parametrize("transport", ["auto", *PLACING])
async def test_a_receiver_without_an_arena_is_reached_over_grpc(
    transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path, num_slots=0) as receiver, sending(rig, tmp_path, transport) as client:
        pairing = await client.pair(receiver.peer)
        names = {"auto": ["shm", "nixl"] if is_installed() else ["shm"]}.get(transport, [transport])
        why = "the receiver has no arena (its arena_bytes is less than a slot)"
        assert pairing == Pairing(transport="grpc", note="; ".join(f"no {name}: {why}" for name in names))
        assert client.counters == {"transport_fallbacks": 1}
        assert (await send(rig.sender(client, SMALL), rig, reserve(rig))).outcome == Committed()
    assert len(fallbacks(caplog)) == 1


async def test_grpc_by_choice_is_no_fallback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, "grpc") as client:
        assert await client.pair(receiver.peer) == Pairing(transport="grpc")
        assert client.counters == {}
    assert fallbacks(caplog) == []


async def test_nixl_by_choice_without_the_package_goes_over_grpc(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, without_nixl: None
) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, "nixl") as client:
        pairing = await client.pair(receiver.peer)
        assert pairing.transport == "grpc"
        assert pairing.note.startswith("no nixl: NIXL cannot be used: ")
        assert client.counters == {"transport_fallbacks": 1}
    assert len(fallbacks(caplog)) == 1


@needs_nixl
async def test_nixl_goes_over_grpc_for_a_cache_that_is_not_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(make_cache(), make_cache())
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, "nixl") as client:
        client._memory = None  # as of a cache that is not on the host
        pairing = await client.pair(receiver.peer)
        assert pairing.transport == "grpc"
        assert "a cache on the host" in pairing.note


@pytest.mark.parametrize("transport", ["auto", *PLACING])
async def test_slots_that_are_too_small_are_not_used(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with (
        receiving(rig, tmp_path, slot_bytes=4096) as receiver,
        sending(rig, tmp_path, transport, max_frame_bytes=4097) as client,
    ):
        pairing = await client.pair(receiver.peer)
        assert pairing.transport == "grpc"
        assert "frames may have 4097 bytes, the receiver's slots have 4096" in pairing.note
        assert (await send(rig.sender(client, SMALL), rig, reserve(rig))).outcome == Committed()


async def test_a_block_that_fits_into_no_slot_is_not_placed_however_small_frames_should_be(
    tmp_path: Path,
) -> None:
    # One block of one layer, 1,920 bytes, is never split.
    rig = make_rig()
    async with (
        receiving(rig, tmp_path, slot_bytes=1024) as receiver,
        sending(rig, tmp_path, "shm", max_frame_bytes=512) as client,
    ):
        assert "frames may have 1920 bytes" in (await client.pair(receiver.peer)).note


@pytest.mark.parametrize("transport", PLACING)
async def test_a_carrier_that_fails_in_use_ends_its_transfer_and_the_pair_goes_over_to_grpc(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    changes: list[tuple[int, Pairing]] = []
    async with staged(rig, tmp_path, transport) as stage:
        stage.client.on_changed = lambda incarnation, pairing: changes.append((incarnation, pairing))
        kind = ShmCarrier if transport == "shm" else NixlCarrier
        deliver = kind.deliver
        first, second, third = (reserve(rig, name, 20) for name in (b"a", b"b", b"c"))
        # A write that is open meanwhile keeps its carrier, and may end its transfer well.
        async with stage.sender().transfer(rig.kv_source(second), target_of(second)) as other:
            other.blocks_ready(16)
            await until(partial(rig.has_frames, 1))

            async def fail(_carrier: object, _slots: Sequence[int], _frames: Sequence[OutgoingFrame]) -> None:
                raise PeerLost("the adapter is broken")

            monkeypatch.setattr(kind, "deliver", fail)
            with pytest.raises(PeerLost, match="the adapter is broken"):
                await send(stage.sender(), rig, first)
            monkeypatch.setattr(kind, "deliver", deliver)
            pairing = Pairing(transport="grpc", note="the adapter is broken")
            assert changes == [(INCARNATION, pairing)]
            assert await stage.client.pair(stage.receiving.peer) == pairing
            assert (await other.commit(TOKEN)).outcome == Committed()
        assert (await send(stage.sender(), rig, third)).outcome == Committed()
        assert rig.has_all(third, third.block_ids)
        assert (await send(stage.sender(), rig, first)).outcome == Committed()
        assert changes == [(INCARNATION, pairing)]
        assert stage.client.counters == {"transport_fallbacks": 1}
        # Something of the failed write may still be under way, and nobody says that it is not.
        await until(lambda: stage.slots.num_held == 0)
        assert stage.slots.num_quarantined > 0
        stage.slots.met(Sender("prefill-0", SENDER + 1))
        await stage.until_all_free()
    assert len(fallbacks(caplog)) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_paired_connection_is_warm(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, TcpProxy(receiver.server.port) as proxy:
        peer = Peer(worker="decode-0", incarnation=INCARNATION, address=proxy.address)
        async with sending(rig, tmp_path, transport) as client:
            assert (await client.pair(peer)).transport == transport
            (connection,) = proxy.connections
            for attempt_id in (b"a", b"b"):
                assert (await send(rig.sender(client, SMALL), rig, reserve(rig, attempt_id, 60))).outcome == (
                    Committed()
                )
            assert proxy.connections == {connection}


class SilentService(KvService):
    """Never answers who introduces itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.was_asked = asyncio.Event()

    async def pair(self, request: PairRequest, _context: object) -> PairResponse:
        self.was_asked.set()
        await asyncio.Event().wait()
        return await super().pair(request, _context)


async def test_a_receiver_that_does_not_answer_is_peer_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAIR_TIMEOUT_S", 0.1)
    rig = make_rig()
    async with (
        receiving(rig, tmp_path, kind=SilentService) as receiver,
        sending(rig, tmp_path, "auto") as client,
    ):
        with pytest.raises(PeerLost, match="decode-0 does not answer"):
            await client.pair(receiver.peer)
        assert client.num_connections == 0


@pytest.mark.parametrize("ends", ["part", "close"])
@pytest.mark.parametrize("state", ["connecting", "introducing"])
async def test_a_receiver_that_is_dropped_while_it_is_being_paired_is_peer_lost_to_all_that_wait(
    ends: str, state: str, tmp_path: Path
) -> None:
    rig = make_rig()
    connected = asyncio.Event()
    async with (
        # It takes connections, and says nothing: gRPC goes on waiting for the server's first word.
        await asyncio.start_server(lambda *_: connected.set(), "127.0.0.1", 0) as mute,
        receiving(rig, tmp_path, kind=SilentService) as receiver,
        sending(rig, tmp_path, "auto") as client,
    ):
        peer = receiver.peer
        if state == "connecting":
            address = f"127.0.0.1:{mute.sockets[0].getsockname()[1]}"
            peer = dataclasses.replace(peer, address=address)
        pairings = [asyncio.create_task(client.pair(peer)) for _ in range(2)]
        service = receiver.service
        assert isinstance(service, SilentService)
        await asyncio.wait_for((service.was_asked if state == "introducing" else connected).wait(), 5)
        if ends == "part":
            await client.part(INCARNATION)
        else:
            await client.close()
        results = await asyncio.wait_for(asyncio.gather(*pairings, return_exceptions=True), 5)
        assert [type(result) for result in results] == [PeerLost, PeerLost]
        assert client.num_connections == 0


async def test_parting_lets_open_writes_end(tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, "shm") as stage:
        lease = reserve(rig)
        async with stage.sender().transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            await stage.client.part(INCARNATION)
            assert stage.client.num_connections == 0
            assert (await transfer.commit(TOKEN)).outcome == Committed()
        with pytest.raises(PeerLost, match="not paired"):
            await send(stage.sender(), rig, reserve(rig, b"b", 20))
        await stage.until_all_free()


async def test_a_pair_made_anew_knows_of_writes_that_began_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever is not named counts as quiet, and its slots are given to others.
    named: list[set[bytes]] = []

    def noting(ticket: Ticket, sender: Sender, wanted_slots: int, open_attempts: Iterable[bytes]) -> Any:
        named.append({*open_attempts})
        return encode_open(ticket, sender, wanted_slots, open_attempts)

    monkeypatch.setattr(writer_module, "encode_open", noting)
    rig = make_rig()
    async with staged(rig, tmp_path, "shm") as stage:
        first, second, third = (reserve(rig, name, 20) for name in (b"a", b"b", b"c"))
        async with stage.sender().transfer(rig.kv_source(first), target_of(first)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            await stage.client.part(INCARNATION)
            await stage.client.pair(stage.receiving.peer)
            await send(stage.sender(), rig, second)
            await transfer.commit(TOKEN)
        await send(stage.sender(), rig, third)
        await stage.client.part(INCARNATION)
        await stage.until_all_free()
        assert stage.client._writing == {}
    assert named == [set(), {first.attempt_id}, set()]


def test_a_transport_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="auto, shm, nixl, grpc") as caught:
        ClientConfig(transport="rdma")
    assert caught.value.field == "kv_transport"
