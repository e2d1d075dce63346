"""The gRPC transport against real servers on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc.aio
import pytest
import torch

from baton.errors import IncompatiblePeer, KvTransferFailed, PeerLost
from baton.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.rpc_server import Registration, RpcServer
from baton.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc
from kvtransfer.contract import Committed, Gone, GoneReason
from kvtransfer.lease_table import Lease, LeaseState
from kvtransfer.sender import KvSender, SenderConfig, TransferOutcome
from kvtransfer.transports.grpc import ADMITTED, SERVICE_NAME, GrpcKvService, GrpcKvTransport, end_of
from tests.kvtransfer.faults import FAULTS, FaultyTransport
from tests.kvtransfer.rig import INCARNATION, TOKEN, Rig, make_cache, make_rig, target_of, until

torch.set_num_threads(1)

SMALL = SenderConfig(max_frame_bytes=4000, stall_timeout_s=0.3)


@asynccontextmanager
async def serving(rig: Rig, port: int = 0) -> AsyncIterator[RpcServer]:
    service = GrpcKvService(rig.receiver)
    async with await RpcServer.start(
        [Registration(name=SERVICE_NAME, add=service.add_to)], port=port
    ) as server:
        yield server


@asynccontextmanager
async def transport() -> AsyncIterator[GrpcKvTransport]:
    client = GrpcKvTransport()
    try:
        yield client
    finally:
        await client.close()


def reserve(rig: Rig, attempt_id: bytes = b"a", num_tokens: int = 70) -> Lease[str]:
    return rig.reserve(attempt_id, num_tokens, now=asyncio.get_running_loop().time())


async def send(
    sender: KvSender, rig: Rig, lease: Lease[str], address: str, **options: int
) -> TransferOutcome:
    target = target_of(lease, address, **options)
    async with sender.transfer(rig.kv_source(lease), target) as transfer:
        return await asyncio.wait_for(transfer.commit(TOKEN), 10)


async def until_idle(rig: Rig) -> None:
    await until(lambda: rig.receiver.num_open_writes == 0)


async def test_a_transfer_commits_and_the_channel_is_reused() -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        sender = KvSender(rig.source, client, SMALL)
        for attempt_id in (b"a", b"b"):
            lease = reserve(rig, attempt_id, 60)
            result = await send(sender, rig, lease, server.address)
            assert result.outcome == Committed()
            assert rig.has_all(lease, lease.block_ids)
        assert client.num_connections == 1
    assert rig.committed == [("a", TOKEN), ("b", TOKEN)]


async def test_a_first_token_without_logprob_stays_without() -> None:
    rig = make_rig()
    token = TOKEN.__class__(token_id=151_000, logprob=None, start_index=12)
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        sender = KvSender(rig.source, client, SMALL)
        async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as transfer:
            await transfer.commit(token)
    assert rig.committed == [("a", token)]


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_fault_ends_in_the_right_bytes_or_a_typed_error(fault: str) -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        sender = KvSender(rig.source, FaultyTransport(client, {2: fault}), SMALL)
        if fault in ("stall", "cut"):
            with pytest.raises(KvTransferFailed if fault == "stall" else PeerLost):
                await send(sender, rig, lease, server.address)
            await until_idle(rig)
            assert lease.state is LeaseState.RESERVED
        else:
            assert (await send(sender, rig, lease, server.address)).outcome == Committed()
            assert rig.has_all(lease, lease.block_ids)


async def test_another_incarnation_is_fenced_and_a_wrong_ticket_unknown() -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        sender = KvSender(rig.source, client, SMALL)
        result = await send(sender, rig, lease, server.address, incarnation=INCARNATION + 1)
        assert result.outcome == Gone(GoneReason.FENCED)
        lease.lease_id = bytes(16)
        forged = target_of(lease, server.address)
        lease.lease_id = b"\x01" * 16
        async with sender.transfer(rig.kv_source(lease), forged) as transfer:
            assert (await transfer.commit(TOKEN)).outcome == Gone(GoneReason.UNKNOWN)
        assert lease.state is LeaseState.RESERVED
        assert rig.leases.num_refused_writes == 2


async def test_a_model_of_another_shape_is_refused_by_the_name_of_the_field() -> None:
    rig = make_rig(cache=make_cache(num_layers=4))
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        with pytest.raises(IncompatiblePeer, match="num_layers is 2 at the sender and 4 here"):
            await send(KvSender(rig.source, client, SMALL), rig, lease, server.address)


async def test_ending_a_lease_ends_a_silent_senders_stream_at_once() -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        sender = KvSender(rig.source, client, SMALL)
        async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            rig.leases.release(b"a", GoneReason.CANCELLED, asyncio.get_running_loop().time())
            assert rig.ledger() == {"free": 8, "leases": 0, "reserved": 0, "writes": 0}
            result = await asyncio.wait_for(transfer.commit(TOKEN), 5)
        assert result.outcome == Gone(GoneReason.CANCELLED)


async def test_a_newer_stream_fences_the_older_one() -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        sender = KvSender(rig.source, client, SMALL)
        async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as older:
            older.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as newer:
                newer.blocks_ready(16)
                await until(partial(rig.has_frames, 2))
                assert (await older.commit(TOKEN)).outcome == Gone(GoneReason.FENCED)
                assert (await newer.commit(TOKEN)).outcome == Committed()
    assert rig.has_all(lease, lease.block_ids)
    assert len(rig.committed) == 1


async def test_leaving_in_the_middle_frees_the_stream_on_both_sides() -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        before = rig.ledger()
        sender = KvSender(rig.source, client, SMALL)
        async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
        assert sender.num_open_transfers == 0
        await until_idle(rig)
        assert rig.ledger() == before


async def test_a_receiver_that_stops_is_peer_lost_within_the_second() -> None:
    rig = make_rig()
    async with transport() as client, serving(rig) as server:
        lease = reserve(rig)
        sender = KvSender(rig.source, client)
        async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            await server.stop()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(transfer.commit(TOKEN), 1)


async def test_nobody_listening_is_peer_lost_and_its_channel_dropped() -> None:
    rig = make_rig()
    async with serving(rig) as server:
        address = server.address
    async with transport() as client:
        lease = reserve(rig)
        with pytest.raises(PeerLost, match="cannot connect to decode-0"):
            await send(KvSender(rig.source, client), rig, lease, address)
        assert client.num_connections == 0


async def test_a_worker_restarted_at_the_same_address_is_reached_by_a_fresh_channel() -> None:
    first, second = make_rig(), make_rig(incarnation=INCARNATION + 1)
    async with transport() as client:
        async with serving(first) as server:
            port = server.port
            lease = reserve(first)
            sender = KvSender(first.source, client, SMALL)
            assert (await send(sender, first, lease, server.address)).outcome == Committed()
        async with serving(second, port) as server:
            lease = reserve(second)
            sender = KvSender(second.source, client, SMALL)
            result = await send(sender, second, lease, server.address, incarnation=INCARNATION + 1)
            assert result.outcome == Committed()
            assert client.num_connections == 1


async def test_the_wire_is_plain_protobuf() -> None:
    # A sender that uses the generated stub, and no code of kvtransfer, must be understood.
    rig = make_rig()
    async with serving(rig) as server:
        lease = reserve(rig)
        channel = grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
        call = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel).Write()
        fmt = kv_transfer_service_pb2.KvFormat(
            dtype="float32", layout="HND", block_size=16, num_layers=2, num_kv_heads=3, head_dim=5
        )
        opening = kv_transfer_service_pb2.OpenWrite(
            lease_id=lease.lease_id, attempt_id=b"a", incarnation=INCARNATION, format=fmt
        )
        await call.write(kv_transfer_service_pb2.WriteRequest(open=opening))
        await call.write(kv_transfer_service_pb2.WriteRequest(frame=b"not a frame"))
        commit = kv_transfer_service_pb2.CommitWrite(num_frames=1, first_token={"token_ids": [3]})
        await call.write(kv_transfer_service_pb2.WriteRequest(commit=commit))
        answer = await call.read()
        assert list(answer.resend.indices) == [0]
        assert rig.receiver.counters["bad_frame_truncated"] == 1
        call.cancel()
        await channel.close()
        await until_idle(rig)


async def test_a_write_that_does_not_begin_with_an_open_is_an_invalid_argument() -> None:
    rig = make_rig()
    async with serving(rig) as server:
        channel = grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
        call = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel).Write()
        await call.write(kv_transfer_service_pb2.WriteRequest(frame=b"x"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()


async def test_closing_the_transport_under_a_transfer_is_peer_lost() -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        lease = reserve(rig)
        sender = KvSender(rig.source, client, SMALL)
        async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as transfer:
            transfer.blocks_ready(16)
            await until(partial(rig.has_frames, 1))
            await client.close()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(transfer.commit(TOKEN), 5)
        await until_idle(rig)


async def test_a_lease_that_ends_under_a_sender_at_full_speed_is_always_answered() -> None:
    # Frames far above the stream's window: the sender is in the middle of a write when the call ends.
    rig = make_rig(make_cache(head_dim=2048), make_cache(head_dim=2048))
    async with serving(rig) as server, transport() as client:
        sender = KvSender(rig.source, client, SenderConfig(stall_timeout_s=5))
        for attempt in range(20):
            lease = reserve(rig, b"%d" % attempt, 120)
            async with sender.transfer(rig.kv_source(lease), target_of(lease, server.address)) as transfer:
                commit = asyncio.create_task(transfer.commit(TOKEN))
                num_frames = rig.receiver.counters["frames"] + 1 + attempt % 4
                await until(partial(rig.has_frames, num_frames))
                now = asyncio.get_running_loop().time()
                rig.leases.release(lease.attempt_id, GoneReason.CANCELLED, now)
                assert (await commit).outcome == Gone(GoneReason.CANCELLED)
        assert rig.ledger() == {"free": 8, "leases": 0, "reserved": 0, "writes": 0}


async def test_a_refused_write_gets_no_frame() -> None:
    rig = make_rig()
    async with serving(rig) as server, transport() as client:
        sender = KvSender(rig.source, client, SMALL)
        for attempt in range(10):
            lease = reserve(rig, b"%d" % attempt)
            rig.leases.release(lease.attempt_id, GoneReason.CANCELLED, asyncio.get_running_loop().time())
            result = await send(sender, rig, lease, server.address)
            assert result == TransferOutcome(
                outcome=Gone(GoneReason.CANCELLED), num_bytes=0, duration_s=result.duration_s
            )


class DeafServer:
    """Admits every write and never reads a frame."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._write)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, {"Write": handler}),)
        )

    async def _write(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.send_initial_metadata((ADMITTED,))
        self.num_writes += 1
        await asyncio.Event().wait()

    async def start(self) -> str:
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"


@pytest.mark.parametrize("end", ["stall", "server stops", "transport closes"])
async def test_a_write_that_flow_control_holds_back_ends_by_name(end: str) -> None:
    rig = make_rig(make_cache(head_dim=2048), make_cache(head_dim=2048))
    deaf = DeafServer()
    address = await deaf.start()
    async with transport() as client:
        sender = KvSender(rig.source, client, SenderConfig(stall_timeout_s=0.5 if end == "stall" else 5))
        lease = reserve(rig)
        async with sender.transfer(rig.kv_source(lease), target_of(lease, address)) as transfer:
            commit = asyncio.create_task(transfer.commit(TOKEN))
            await until(lambda: deaf.num_writes == 1)
            for _ in range(200):  # let the window fill
                await asyncio.sleep(0)
            if end == "server stops":
                await deaf.server.stop(0)
            elif end == "transport closes":
                await client.close()
            with pytest.raises(KvTransferFailed if end == "stall" else PeerLost):
                await asyncio.wait_for(commit, 2)
    await deaf.server.stop(0)


@pytest.mark.parametrize(
    ("code", "metadata", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, (), PeerLost),
        (grpc.StatusCode.CANCELLED, (), PeerLost),
        # gRPC's own words for a write into a broken stream, and a defect that our server reports.
        (grpc.StatusCode.INTERNAL, (), PeerLost),
        (grpc.StatusCode.INTERNAL, (("baton-error-code", "INTERNAL"),), KvTransferFailed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (), KvTransferFailed),
        (grpc.StatusCode.FAILED_PRECONDITION, (("baton-error-code", "INCOMPATIBLE_PEER"),), IncompatiblePeer),
    ],
)
def test_a_failed_stream_has_one_meaning(
    code: grpc.StatusCode, metadata: tuple[tuple[str, str], ...], kind: type[Exception]
) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details="why")
    assert type(end_of(error, "decode-0")) is kind
