"""The receiver's end of writes: its slots, and what it takes from senders that do as they please."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
import torch
import xxhash

from baton.errors import PeerLost
from baton.rpc import CHANNEL_OPTIONS
from baton.v1.kv_transfer_service_pb2 import (
    CommitWrite,
    KvFormat,
    OpenWrite,
    PlacedFrames,
    WriteRequest,
    WriteResponse,
)
from baton.v1.kv_transfer_service_pb2_grpc import KvTransferServiceStub
from benchmarks.chaos.tcp_proxy import TcpProxy
from kvtransfer.contract import Committed, Gone, GoneReason, Peer
from kvtransfer.lease_table import Lease, LeaseState
from kvtransfer.outgoing import CacheFrame, HostReader
from kvtransfer.sender import KvSource
from tests.kvtransfer.rig import INCARNATION, TOKEN, Rig, make_rig, plan_frames, target_of, until
from tests.kvtransfer.stage import (
    PLACING,
    SENDER,
    SMALL,
    SMALL_BYTES,
    Receiving,
    now,
    receiving,
    reserve,
    send,
    sending,
    staged,
)

torch.set_num_threads(1)

FORMAT = KvFormat(dtype="float32", layout="HND", block_size=16, num_layers=2, num_kv_heads=3, head_dim=5)


@asynccontextmanager
async def raw_write(
    receiver: Receiving, lease: Lease[str], *, wanted_slots: int = 0, fmt: KvFormat = FORMAT
) -> AsyncIterator[grpc.aio.StreamStreamCall[WriteRequest, WriteResponse]]:
    """An open write of a sender that has nothing but the generated stub."""
    channel = grpc.aio.insecure_channel(receiver.peer.address, options=CHANNEL_OPTIONS)
    call = KvTransferServiceStub(channel).Write()
    opening = OpenWrite(
        lease_id=lease.lease_id,
        attempt_id=lease.attempt_id,
        incarnation=INCARNATION,
        format=fmt,
        wanted_slots=wanted_slots,
        sender="raw",
        sender_incarnation=1,
    )
    try:
        await call.write(WriteRequest(open=opening))
        yield call
    finally:
        call.cancel()
        await channel.close()


async def granted(call: grpc.aio.StreamStreamCall[WriteRequest, WriteResponse]) -> list[int]:
    response = await asyncio.wait_for(call.read(), 5)
    assert response.WhichOneof("message") == "granted"
    return list(response.granted.slots)


def placed(slots: Sequence[int], headers: Sequence[bytes]) -> WriteRequest:
    return WriteRequest(placed=PlacedFrames(slots=slots, headers=headers))


def frames_of(rig: Rig, num_tokens: int) -> list[tuple[bytes, bytes]]:
    reader = HostReader(rig.source)
    specs = plan_frames(reader.format, num_tokens=num_tokens, max_frame_bytes=SMALL_BYTES)
    frames = [CacheFrame(reader, rig.source_blocks, spec) for spec in specs]
    return [(frame.header(), b"".join(frame.runs())) for frame in frames]


def commit(num_frames: int) -> WriteRequest:
    return WriteRequest(commit=CommitWrite(num_frames=num_frames, first_token={"token_ids": [3]}))


async def test_frames_in_a_stream_are_plain_protobuf(tmp_path: Path) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, raw_write(receiver, reserve(rig)) as call:
        await call.write(WriteRequest(frame=b"not a frame"))
        await call.write(commit(1))
        answer = await call.read()
        assert list(answer.resend.indices) == [0]
        assert rig.receiver.counters["bad_frame_truncated"] == 1


async def test_frames_in_slots_are_plain_protobuf_and_plain_bytes(tmp_path: Path) -> None:
    rig = make_rig()
    lease = reserve(rig, num_tokens=20)
    frames = frames_of(rig, 20)
    async with receiving(rig, tmp_path) as receiver, raw_write(receiver, lease, wanted_slots=2) as call:
        slots = await granted(call)
        assert len(slots) == 2
        assert receiver.arena is not None
        with receiver.arena.segment.path.open("r+b") as segment:
            for slot, (_, payload) in zip(slots, frames, strict=True):
                segment.seek(4096 + slot * 4096)
                segment.write(payload)
        await call.write(placed(slots, [header for header, _ in frames]))
        assert await granted(call) == slots
        await call.write(commit(2))
        assert (await call.read()).WhichOneof("message") == "committed"
        assert rig.has_all(lease, lease.block_ids)
        await until(lambda: receiver.slots.num_free == 32)


async def test_a_write_that_does_not_begin_with_an_open_is_an_invalid_argument(tmp_path: Path) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver:
        channel = grpc.aio.insecure_channel(receiver.peer.address, options=CHANNEL_OPTIONS)
        call = KvTransferServiceStub(channel).Write()
        await call.write(WriteRequest(frame=b"x"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()


@pytest.mark.parametrize(
    ("slots", "num_headers", "why"),
    [
        ("another's", 1, "is not this write's"),
        ("beyond", 1, "is not this write's"),
        ("own", 2, "needs a header"),
    ],
)
async def test_a_placed_frame_in_a_slot_that_is_not_the_writes_is_refused(
    tmp_path: Path, slots: str, num_headers: int, why: str
) -> None:
    rig = make_rig()
    header = frames_of(rig, 20)[0][0]
    async with (
        receiving(rig, tmp_path) as receiver,
        raw_write(receiver, reserve(rig, b"a", 20), wanted_slots=2) as call,
        raw_write(receiver, reserve(rig, b"b", 20), wanted_slots=2) as other,
    ):
        own, others = await granted(call), await granted(other)
        chosen = {"own": own[0], "another's": others[0], "beyond": 1 << 31}[slots]
        await call.write(placed([chosen], [header] * num_headers))
        with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rig.receiver.counters["frames"] == 0
        await until(lambda: receiver.slots.num_quarantined == 2)
        await other.write(WriteRequest(quiet=True))
        await other.done_writing()
        await until(lambda: receiver.slots.num_held == 0)
        assert receiver.slot_counts() == (30, 0, 2, 0)


def forged_length(header: bytes, payload: bytes, num_bytes: int) -> bytes:
    """A header that claims another length of its payload, with a digest that fits."""
    fields = header[:36] + struct.pack("<Q", num_bytes)
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields + payload))


@pytest.mark.parametrize("claimed", [0, 3839, 3841, 4097, 1 << 20, 2**64 - 1])
async def test_a_placed_frame_that_claims_another_length_is_dropped_and_asked_for_again(
    tmp_path: Path, claimed: int
) -> None:
    rig = make_rig()
    lease = reserve(rig, num_tokens=16)
    ((header, payload),) = frames_of(rig, 16)
    async with receiving(rig, tmp_path) as receiver, raw_write(receiver, lease, wanted_slots=1) as call:
        slots = await granted(call)
        assert receiver.arena is not None
        receiver.arena.payload(slots[0])[: len(payload)] = payload
        await call.write(placed(slots, [forged_length(header, payload, claimed)]))
        assert await granted(call) == slots
        assert rig.receiver.counters == {"bad_frame_length": 1}
        assert bool((rig.cache.logical == -1).all())
        await call.write(commit(1))
        assert list((await call.read()).resend.indices) == [0]
        await call.write(placed(slots, [header]))
        assert await granted(call) == slots
        await call.write(commit(1))
        assert (await call.read()).WhichOneof("message") == "committed"


async def test_a_frame_above_the_largest_payload_is_dropped(tmp_path: Path) -> None:
    # One block of both layers is just over 8 MiB; one of one layer would be taken, whatever its size.
    rig = make_rig()
    lease = reserve(rig, num_tokens=16)
    fmt = KvFormat(dtype="float32", layout="HND", block_size=34_953, num_layers=2, num_kv_heads=3, head_dim=5)
    payload = bytes(2 * (2 * 3 * 34_953 * 5 * 4))
    assert 8 << 20 < len(payload) < (8 << 20) + 1000
    fields = struct.pack(
        "<4sHHIIIIHHBBHHHQ", b"BKVF", 1, 52, 0, 0, 1, 16, 0, 2, 1, 1, 34_953, 3, 5, len(payload)
    )
    frame = fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields + payload)) + payload
    async with receiving(rig, tmp_path) as receiver, raw_write(receiver, lease, fmt=fmt) as call:
        await call.write(WriteRequest(frame=frame))
        await call.write(commit(1))
        assert list((await call.read()).resend.indices) == [0]
        assert rig.receiver.counters == {"bad_frame_size": 1, "resent_frames": 1}


async def test_a_message_above_the_limit_ends_the_stream(tmp_path: Path) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver:
        channel = grpc.aio.insecure_channel(receiver.peer.address)
        call = KvTransferServiceStub(channel).Write()
        await call.write(WriteRequest(frame=bytes((16 << 20) + 1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await channel.close()


@pytest.mark.parametrize(("num_slots", "max_per_write", "expected"), [(32, 16, 16), (8, 16, 8), (32, 3, 3)])
async def test_a_write_that_wants_a_million_slots_gets_what_one_write_may_have(
    tmp_path: Path, num_slots: int, max_per_write: int, expected: int
) -> None:
    rig = make_rig()
    async with (
        receiving(rig, tmp_path, num_slots=num_slots, max_per_write=max_per_write) as receiver,
        raw_write(receiver, reserve(rig), wanted_slots=1_000_000) as call,
    ):
        slots = await granted(call)
        assert len(set(slots)) == len(slots) == expected
        assert set(slots) <= set(range(num_slots))


async def test_a_sender_that_never_says_quiet_keeps_its_handler_no_longer_than_it_may(tmp_path: Path) -> None:
    rig = make_rig()
    async with (
        receiving(rig, tmp_path, linger_s=0.2) as receiver,
        raw_write(receiver, reserve(rig), wanted_slots=4) as call,
    ):
        await granted(call)
        began = now()
        rig.leases.release(b"a", GoneReason.CANCELLED, began)
        assert (await call.read()).gone == GoneReason.CANCELLED.value
        await call.write(placed([0], [bytes(52)]))  # it goes on as if nothing had happened
        assert await call.read() is grpc.aio.EOF
        assert 0.2 <= now() - began < 1
        assert receiver.slot_counts() == (28, 0, 4, 0)
        assert receiver.service.counters["quarantined_writes"] == 1
        assert rig.receiver.counters == {}


async def test_a_sender_that_never_says_quiet_is_waited_for_only_where_it_has_slots(tmp_path: Path) -> None:
    rig = make_rig()
    async with receiving(rig, tmp_path) as receiver, raw_write(receiver, reserve(rig)) as call:
        await until(lambda: rig.receiver.num_open_writes == 1)
        rig.leases.release(b"a", GoneReason.CANCELLED, now())
        assert (await call.read()).gone == GoneReason.CANCELLED.value
        assert await asyncio.wait_for(call.read(), 1) is grpc.aio.EOF


@pytest.mark.parametrize("transport", PLACING)
async def test_a_sender_cut_off_in_a_write_leaves_its_slots_to_its_next_life(
    transport: str, tmp_path: Path
) -> None:
    rig = make_rig()
    lease = reserve(rig)
    async with receiving(rig, tmp_path) as receiver, TcpProxy(receiver.server.port) as proxy:
        peer = Peer(worker="decode-0", incarnation=INCARNATION, address=proxy.address)
        async with sending(rig, tmp_path, transport) as client:
            await client.pair(peer)
            sender = rig.sender(client, SMALL)
            async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
                transfer.blocks_ready(16)
                await until(partial(rig.has_frames, 1))
                assert receiver.slot_counts() == (16, 16, 0, 0)
                proxy.reset_peer()
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(transfer.commit(TOKEN), 5)
            await until(lambda: receiver.slots.num_held == 0)
            assert lease.state is LeaseState.RESERVED
            assert receiver.slot_counts() == (16, 0, 16, 0)
        async with sending(rig, tmp_path, transport, incarnation=SENDER + 1) as client:
            await client.pair(peer)
            assert receiver.slot_counts() == (32, 0, 0, 0)
            assert (await send(rig.sender(client, SMALL), rig, lease)).outcome == Committed()
            assert rig.has_all(lease, lease.block_ids)


@pytest.mark.parametrize("transport", PLACING)
async def test_the_surplus_of_writes_goes_inside_its_stream(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport, num_slots=16) as stage:
        sender, leases = stage.sender(), [reserve(rig, name, 60) for name in (b"a", b"b")]
        async with (
            sender.transfer(rig.kv_source(leases[0]), target_of(leases[0])) as first,
            sender.transfer(rig.kv_source(leases[1]), target_of(leases[1])) as second,
        ):
            for transfer in (first, second):
                transfer.blocks_ready(32)
            await until(partial(rig.has_frames, 4))
            assert stage.receiving.slot_counts() == (0, 16, 0, 0)
            for transfer, lease in zip((first, second), leases, strict=True):
                assert (await transfer.commit(TOKEN)).outcome == Committed()
                assert rig.has_all(lease, lease.block_ids)
        assert stage.client.counters == stage.receiving.service.counters == {"writes_without_slots": 1}
        await stage.until_all_free()


@pytest.mark.parametrize("transport", ["grpc", *PLACING])
async def test_writes_at_once_never_mix(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport) as stage:
        sender = stage.sender()
        for turn in range(5):
            sources: list[KvSource] = []
            leases = [reserve(rig, b"%d%d" % (turn, part), 30) for part in range(4)]
            for part, lease in enumerate(leases):
                ids = rig.source_blocks[2 * part : 2 * part + 2]
                sources.append(KvSource(attempt_id=lease.attempt_id, block_ids=ids, num_tokens=30))
            pairs = list(zip(leases, sources, strict=True))
            results = await asyncio.gather(
                *(send(sender, rig, lease, source=source) for lease, source in pairs)
            )
            assert [result.outcome for result in results] == [Committed()] * 4
            for lease, source in pairs:
                sent = rig.tokens_of(rig.source, tuple(source.block_ids), 30)
                assert rig.tokens_of(rig.cache, lease.block_ids, 30) == sent
                rig.leases.release(lease.attempt_id, GoneReason.CANCELLED, now())
                rig.pool.release(lease.block_ids)
            rig.cache.logical.fill_(-1)
        await stage.until_all_free()


@pytest.mark.parametrize("transport", PLACING)
async def test_a_write_with_a_single_slot_goes_slot_by_slot(transport: str, tmp_path: Path) -> None:
    rig = make_rig()
    async with staged(rig, tmp_path, transport, num_slots=1) as stage:
        lease = reserve(rig, num_tokens=120)
        assert (await send(stage.sender(), rig, lease)).outcome == Committed()
        assert rig.has_all(lease, lease.block_ids)
        assert stage.client.counters == {}
        other = reserve(rig, b"b", 0)
        rig.leases.release(b"b", GoneReason.CANCELLED, now())
        assert (await send(stage.sender(), rig, other)).outcome == Gone(GoneReason.CANCELLED)
        await stage.until_all_free()
