"""One suite for all transports, against real servers on the loopback interface."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
import torch

from baton.errors import IncompatiblePeer, KvTransferFailed, PeerLost
from kvtransfer.contract import Committed, FirstToken, Gone, GoneReason
from kvtransfer.lease_table import LeaseState
from kvtransfer.sender import SenderConfig, TransferOutcome
from kvtransfer.transports import writer
from kvtransfer.transports.grpc_codec import encode_grant
from kvtransfer.transports.service import KvService
from kvtransfer.transports.writer import ADMITTED
from tests.kvtransfer.faults import FAULTS, FaultyTransport
from tests.kvtransfer.rig import INCARNATION, TOKEN, make_cache, make_rig, target_of, until
from tests.kvtransfer.stage import (
    LARGE_DIM,
    LARGE_SLOT,
    SMALL,
    TRANSPORTS,
    now,
    receiving,
    reserve,
    send,
    sending,
    staged,
)

torch.set_num_threads(1)

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


async def test_transfers_commit_over_one_connection(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        for attempt_id in (b"a", b"b"):
            lease = reserve(rig, attempt_id, 60)
            result = await send(stage.sender(), rig, lease)
            assert result.outcome == Committed()
            assert result.num_bytes == 4 * 3840
            assert rig.has_all(lease, lease.block_ids)
        assert stage.client.num_connections == 1
        assert stage.client.counters == stage.receiving.service.counters == {}
        await stage.until_all_free()
    assert rig.committed == [("a", TOKEN), ("b", TOKEN)]


async def test_a_first_token_without_logprob_stays_without(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    token = FirstToken(token_id=151_000, logprob=None, start_index=12)
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        async with stage.sender().transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            await transfer.commit(token)
    assert rig.committed == [("a", token)]


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_fault_ends_in_the_right_bytes_or_a_typed_error(
    transport: str, fault: str, tmp_path: Path
) -> None:
    rig = make_rig()
    # Bit 100 lies in the header: what NIXL writes has to lie in the cache, and cannot be altered on the way.
    bit = 100 if transport == "nixl" else 12_345
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        config = dataclasses.replace(SMALL, stall_timeout_s=0.3) if fault == "stall" else SMALL
        sender = rig.sender(FaultyTransport(stage.client, {2: fault}, bit), config)
        if fault in ("stall", "cut"):
            with pytest.raises(KvTransferFailed if fault == "stall" else PeerLost):
                await send(sender, rig, lease)
            await stage.until_idle()
            assert lease.state is LeaseState.RESERVED
        else:
            assert (await send(sender, rig, lease)).outcome == Committed()
            assert rig.has_all(lease, lease.block_ids)
            assert sender.num_resent_frames == (1 if fault in ("drop", "corrupt") else 0)
        await stage.until_all_free()


async def test_a_lease_of_another_incarnation_is_fenced_and_a_wrong_ticket_unknown(
    transport: str, tmp_path: Path
) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        forged = dataclasses.replace(target_of(lease), lease_id=b"\x01" * 16)
        assert (await send(stage.sender(), rig, lease, target=forged)).outcome == Gone(GoneReason.UNKNOWN)
        rig.receiver._incarnation += 1
        assert (await send(stage.sender(), rig, lease)).outcome == Gone(GoneReason.FENCED)
        assert lease.state is LeaseState.RESERVED
        assert rig.leases.num_refused_writes == 2


async def test_a_model_of_another_shape_is_refused_by_the_name_of_the_field(
    transport: str, tmp_path: Path
) -> None:
    rig = make_rig(cache=make_cache(num_layers=4))
    async with receiving(rig, tmp_path) as receiver, sending(rig, tmp_path, transport) as client:
        with pytest.raises(IncompatiblePeer, match="num_layers is 2 at the sender and 4 here") as caught:
            await client.pair(receiver.peer)
        assert caught.value.field == "num_layers"
        assert client.num_connections == 0
        with pytest.raises(PeerLost, match="not paired with decode-0"):
            await send(rig.sender(client), rig, reserve(rig))


async def test_ending_a_lease_ends_a_silent_senders_stream_and_frees_its_slots_at_once(
    transport: str, tmp_path: Path
) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        async with stage.sender().transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            rig.leases.release(b"a", GoneReason.CANCELLED, now())
            assert rig.ledger() == {"free": 8, "leases": 0, "reserved": 0, "writes": 0}
            # The transfer waits for tokens: nobody calls its writer.
            await stage.until_all_free()
            result = await asyncio.wait_for(transfer.commit(TOKEN), 5)
        assert result.outcome == Gone(GoneReason.CANCELLED)
        assert stage.receiving.service.counters == {}


async def test_a_newer_stream_fences_the_older_one(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        source, target, sender = rig.kv_source(lease), target_of(lease), stage.sender()
        async with sender.transfer(source, target) as older:
            older.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            async with sender.transfer(source, target) as newer:
                newer.blocks_ready(16)
                await until(partial(rig.has_frames, 2))
                assert (await older.commit(TOKEN)).outcome == Gone(GoneReason.FENCED)
                assert (await newer.commit(TOKEN)).outcome == Committed()
        assert rig.has_all(lease, lease.block_ids)
        assert len(rig.committed) == 1
        await stage.until_all_free()


async def test_leaving_at_any_time_leaves_the_receiver_as_before(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        before, sender = rig.ledger(), stage.sender()
        for num_turns in range(40):
            async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
                transfer.blocks_ready(64)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
            assert sender.num_open_transfers == 0
        await stage.until_idle()
        assert rig.ledger() == before
        await stage.until_all_free()
        assert (await send(sender, rig, lease)).outcome == Committed()
        assert rig.has_all(lease, lease.block_ids)


async def test_a_receiver_that_stops_is_peer_lost_within_the_second(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        async with stage.sender().transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            await stage.receiving.server.stop()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(transfer.commit(TOKEN), 1)


async def test_nobody_listening_is_peer_lost_and_its_channel_dropped(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver:
        peer = receiver.peer
    async with sending(rig, tmp_path, transport) as client:
        with pytest.raises(PeerLost, match="cannot connect to decode-0"):
            await client.pair(peer)
        assert client.num_connections == 0


async def test_a_worker_restarted_at_the_same_address_is_paired_anew(transport: str, tmp_path: Path) -> None:
    first, second = make_rig(), make_rig(incarnation=INCARNATION + 1)
    async with sending(first, tmp_path, transport) as client:
        async with receiving(first, tmp_path) as receiver:
            await client.pair(receiver.peer)
            port, old = receiver.server.port, receiver.peer
            sender = first.sender(client, SMALL)
            assert (await send(sender, first, reserve(first))).outcome == Committed()
        async with receiving(second, tmp_path, port=port, incarnation=INCARNATION + 1) as receiver:
            await client.part(old.incarnation)
            with pytest.raises(PeerLost, match="decode-0 has restarted"):
                await client.pair(old)
            assert (await client.pair(receiver.peer)).transport == transport
            lease = reserve(second)
            result = await send(sender, second, lease, target=target_of(lease, INCARNATION + 1))
            assert result.outcome == Committed()
            assert second.has_all(lease, lease.block_ids)
            assert client.num_connections == 1


async def test_closing_the_transport_under_a_transfer_is_peer_lost(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        lease = reserve(rig)
        async with stage.sender().transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            await stage.client.close()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(transfer.commit(TOKEN), 5)
        await stage.until_idle()


async def test_a_lease_that_ends_under_a_sender_at_full_speed_is_always_answered(
    transport: str, tmp_path: Path
) -> None:
    # Frames far above the stream's window: the sender is in the middle of a write when the call ends.
    rig = make_rig(make_cache(head_dim=LARGE_DIM), make_cache(head_dim=LARGE_DIM))
    async with staged(
        rig, tmp_path, transport, num_slots=8, slot_bytes=LARGE_SLOT, max_frame_bytes=LARGE_SLOT
    ) as stage:
        sender = stage.sender(SenderConfig(stall_timeout_s=5))
        for attempt in range(20):
            lease = reserve(rig, b"%d" % attempt, 120)
            async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
                commit = asyncio.create_task(transfer.commit(TOKEN))
                await until(partial(rig.has_frames, rig.receiver.counters["frames"] + 1 + attempt % 4))
                rig.leases.release(lease.attempt_id, GoneReason.CANCELLED, now())
                assert (await commit).outcome == Gone(GoneReason.CANCELLED)
        assert rig.ledger() == {"free": 8, "leases": 0, "reserved": 0, "writes": 0}
        await stage.until_all_free()
        assert stage.receiving.service.counters == {}


async def test_a_refused_write_gets_no_frame(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        for attempt in range(10):
            lease = reserve(rig, b"%d" % attempt)
            rig.leases.release(lease.attempt_id, GoneReason.CANCELLED, now())
            result = await send(stage.sender(), rig, lease)
            assert result == TransferOutcome(
                outcome=Gone(GoneReason.CANCELLED), num_bytes=0, duration_s=result.duration_s
            )
        assert rig.receiver.counters == {}
        await stage.until_all_free()


class DeafService(KvService):
    """Admits every write, grants slots, and never reads a frame."""

    num_writes = 0

    async def write(self, _requests: object, context: grpc.aio.ServicerContext[object, object]) -> None:
        await context.send_initial_metadata((ADMITTED,))
        await context.write(encode_grant(range(4)))
        self.num_writes += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("end", ["stall", "server stops", "transport closes"])
async def test_a_write_that_the_receiver_holds_back_ends_by_name(
    transport: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "QUIET_S", 0.2)
    rig = make_rig(make_cache(head_dim=LARGE_DIM), make_cache(head_dim=LARGE_DIM))
    async with staged(
        rig,
        tmp_path,
        transport,
        num_slots=4,
        slot_bytes=LARGE_SLOT,
        max_frame_bytes=LARGE_SLOT,
        kind=DeafService,
    ) as stage:
        sender = stage.sender(SenderConfig(stall_timeout_s=0.5 if end == "stall" else 5))
        lease = reserve(rig)
        async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
            commit = asyncio.create_task(transfer.commit(TOKEN))
            service = stage.receiving.service
            assert isinstance(service, DeafService)
            await until(lambda: service.num_writes == 1)
            for _ in range(200):  # let the window, or the slots, fill
                await asyncio.sleep(0)
            if end == "server stops":
                await stage.receiving.server.stop()
            elif end == "transport closes":
                await stage.client.close()
            with pytest.raises(KvTransferFailed if end == "stall" else PeerLost):
                await asyncio.wait_for(commit, 2)
