"""Transfers end to end without a network: right bytes, or a typed end; never a hang."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, KvTransferFailed, PeerLost
from kvtransfer.contract import Committed, Gone, GoneReason, KvTransport, Peer
from kvtransfer.lease_table import Lease, LeaseState
from kvtransfer.sender import KvSender, SenderConfig, TransferOutcome
from tests.kvtransfer.faults import FAULTS, FaultyTransport
from tests.kvtransfer.rig import (
    INCARNATION,
    TOKEN,
    Rig,
    make_cache,
    make_rig,
    target_of,
    until,
)

torch.set_num_threads(1)

# One block of the rig's cache is 2 layers x 1,920 bytes x 2 (fp32 keys and values).
LAYER_BLOCK_BYTES = 2 * 3 * 16 * 5 * 4
SMALL = SenderConfig(max_frame_bytes=2 * LAYER_BLOCK_BYTES, stall_timeout_s=0.05)


def sender_of(rig: Rig, transport: KvTransport | None = None, config: SenderConfig = SMALL) -> KvSender:
    return rig.sender(transport or rig.network(), config)


async def send(sender: KvSender, rig: Rig, lease: Lease[str]) -> TransferOutcome:
    async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
        return await asyncio.wait_for(transfer.commit(TOKEN), 5)


async def test_all_tokens_arrive_and_the_first_token_with_them() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    blocks = list(lease.block_ids)
    result = await send(sender_of(rig), rig, lease)
    assert result.outcome == Committed()
    assert result.num_bytes == 5 * 2 * LAYER_BLOCK_BYTES
    assert rig.has_all(lease, blocks)
    assert rig.committed == [("a", TOKEN)]
    assert lease.state is LeaseState.COMMITTED
    assert rig.ledger() == {"free": 3, "leases": 1, "reserved": 0, "writes": 0}


async def test_chunks_travel_while_later_ones_are_still_computed() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    sender = sender_of(rig)
    late = rig.source.logical[rig.source_blocks[3]].clone()
    rig.source.logical[rig.source_blocks[3]] = 99
    async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
        transfer.blocks_ready(50)
        await until(partial(rig.has_frames, 3))
        for _ in range(20):
            await asyncio.sleep(0)
        assert rig.receiver.counters["frames"] == 3  # 50 tokens are three whole blocks
        rig.source.logical[rig.source_blocks[3]] = late
        assert (await transfer.commit(TOKEN)).outcome == Committed()
    assert rig.has_all(lease, lease.block_ids)


async def test_blocks_the_receiver_holds_do_not_travel_and_are_not_touched() -> None:
    rig = make_rig()
    held = rig.pool.allocate(2)
    lease = rig.leases.reserve(b"a", "a", num_blocks=5, num_tokens=70, held_block_ids=held, now=0.0)
    assert isinstance(lease, Lease)
    result = await send(sender_of(rig), rig, lease)
    assert result.outcome == Committed()
    assert result.num_bytes == 3 * 2 * LAYER_BLOCK_BYTES  # blocks 2, 3 and 4
    received = rig.tokens_of(rig.cache, lease.block_ids, 70)
    sent = rig.tokens_of(rig.source, rig.source_blocks, 70)
    assert received[32:] == sent[32:]
    untouched = torch.full((2, 2, 3, 5), -1.0).tolist()
    assert received[:32] == [untouched] * 32


async def test_everything_held_commits_without_a_frame() -> None:
    rig = make_rig()
    held = rig.pool.allocate(3)
    lease = rig.leases.reserve(b"a", "a", num_blocks=3, num_tokens=48, held_block_ids=held, now=0.0)
    assert isinstance(lease, Lease)
    assert await send(sender_of(rig), rig, lease) == TransferOutcome(
        outcome=Committed(), num_bytes=0, duration_s=0.0
    )


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("fault", FAULTS)
async def test_one_fault_ends_in_the_right_bytes_or_a_typed_error(fault: str, at: int) -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    sender = sender_of(rig, FaultyTransport(rig.network(), {at: fault}))
    if fault == "stall":
        with pytest.raises(KvTransferFailed, match="no progress"):
            await send(sender, rig, lease)
    elif fault == "cut":
        with pytest.raises(PeerLost):
            await send(sender, rig, lease)
    else:
        assert (await send(sender, rig, lease)).outcome == Committed()
        assert rig.has_all(lease, lease.block_ids)
        assert sender.num_resent_frames == (1 if fault in ("drop", "corrupt") else 0)
    assert sender.num_open_transfers == rig.receiver.num_open_writes == 0


async def test_a_lease_survives_a_cut_stream_and_takes_a_new_one_from_scratch() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    with pytest.raises(PeerLost):
        await send(sender_of(rig, FaultyTransport(rig.network(), {3: "cut"})), rig, lease)
    assert lease.state is LeaseState.RESERVED
    assert (await send(sender_of(rig), rig, lease)).outcome == Committed()
    assert rig.has_all(lease, lease.block_ids)


@settings(max_examples=60, deadline=None)
@given(
    faults=st.dictionaries(st.integers(0, 12), st.sampled_from(FAULTS), max_size=6),
    bit=st.integers(0, 200_000),
    num_tokens=st.integers(1, 120),
)
def test_any_mix_of_faults_ends_and_never_commits_wrong_bytes(
    faults: dict[int, str], bit: int, num_tokens: int
) -> None:
    async def check() -> None:
        rig = make_rig()
        lease = rig.reserve(b"a", num_tokens)
        blocks = list(lease.block_ids)
        config = SenderConfig(max_frame_bytes=LAYER_BLOCK_BYTES, stall_timeout_s=0.01)
        sender = sender_of(rig, FaultyTransport(rig.network(), faults, bit), config)
        try:
            result = await send(sender, rig, lease)
        except (KvTransferFailed, PeerLost):
            assert rig.committed == []
        else:
            assert (result.outcome == Committed()) == (rig.committed == [("a", TOKEN)])
            assert result.outcome == Gone(GoneReason.CORRUPT) or rig.has_all(lease, blocks)
        assert sender.num_open_transfers == rig.receiver.num_open_writes == 0

    asyncio.run(check())


async def test_a_frame_that_never_arrives_intact_ends_the_attempt_as_corrupt() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    before = rig.pool.num_blocks
    transport = FaultyTransport(rig.network(), dict.fromkeys(range(4, 50), "corrupt"))
    result = await send(sender_of(rig, transport), rig, lease)
    assert result.outcome == Gone(GoneReason.CORRUPT)
    assert rig.lost == [("a", "CORRUPT")]
    assert rig.ledger() == {"free": before, "leases": 0, "reserved": 0, "writes": 0}
    assert transport.num_sent == 5 + 3


async def test_a_sender_gives_up_a_receiver_that_asks_for_ever() -> None:
    rig = make_rig(max_resends=100)
    lease = rig.reserve(b"a", 70)
    transport = FaultyTransport(rig.network(), dict.fromkeys(range(4, 500), "drop"))
    with pytest.raises(KvTransferFailed, match="frame 4 did not reach decode-0 intact"):
        await send(sender_of(rig, transport), rig, lease)
    assert transport.num_sent == 5 + 3


async def test_a_cancelled_lease_refuses_late_frames_and_counts_them() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    blocks = list(lease.block_ids)
    sender = sender_of(rig)
    async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
        transfer.blocks_ready(16)
        await until(partial(rig.has_frames, 1))
        rig.leases.release(b"a", GoneReason.CANCELLED, 0.0)
        assert rig.ledger() == {"free": 8, "leases": 0, "reserved": 0, "writes": 0}
        rig.cache.logical.fill_(-5)
        result = await asyncio.wait_for(transfer.commit(TOKEN), 5)
    assert result.outcome == Gone(GoneReason.CANCELLED)
    assert rig.leases.num_refused_writes == 1
    assert bool((rig.cache.logical[blocks] == -5).all())


async def test_another_incarnation_is_fenced() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    network = rig.network()
    await network.pair(Peer(worker="decode-0", incarnation=INCARNATION + 1, address="memory"))
    other = target_of(lease, incarnation=INCARNATION + 1)
    async with sender_of(rig, network).transfer(rig.kv_source(lease), other) as transfer:
        assert (await transfer.commit(TOKEN)).outcome == Gone(GoneReason.FENCED)
    assert lease.state is LeaseState.RESERVED
    assert rig.leases.num_refused_writes == 1


async def test_leaving_the_context_in_the_middle_leaves_the_receiver_as_before() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    before = rig.ledger()
    sender = sender_of(rig)
    tasks = asyncio.all_tasks()
    async with sender.transfer(rig.kv_source(lease), target_of(lease)) as transfer:
        transfer.blocks_ready(40)
        await until(partial(rig.has_frames, 1))
        assert rig.receiver.num_open_writes == 1
    assert rig.ledger() == before
    assert lease.state is LeaseState.RESERVED
    assert sender.num_open_transfers == 0
    assert asyncio.all_tasks() == tasks


async def test_cancelling_the_waiting_caller_ends_the_transfer() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    sender = sender_of(rig, FaultyTransport(rig.network(), {2: "stall"}), SenderConfig())
    task = asyncio.create_task(send(sender, rig, lease))
    await until(lambda: rig.receiver.num_open_writes == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sender.num_open_transfers == rig.receiver.num_open_writes == 0


async def test_an_unreachable_receiver_is_peer_lost_and_the_same_blocks_go_elsewhere() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 70)
    sender = sender_of(rig)
    async with sender.transfer(rig.kv_source(lease), target_of(lease, "nowhere")) as transfer:
        with pytest.raises(PeerLost):
            await transfer.commit(TOKEN)
    assert (await send(sender, rig, lease)).outcome == Committed()


async def test_many_transfers_share_the_loop() -> None:
    rig = make_rig()
    leases = [rig.reserve(name, 30) for name in (b"a", b"b", b"c")]
    blocks = [list(lease.block_ids) for lease in leases]
    sender = sender_of(rig)
    results = await asyncio.gather(*(send(sender, rig, lease) for lease in leases))
    assert [result.outcome for result in results] == [Committed()] * 3
    assert all(rig.has_all(lease, ids) for lease, ids in zip(leases, blocks, strict=True))


async def test_dtype_block_size_and_layout_are_converted_on_the_way() -> None:
    source = make_cache(block_size=32, dtype=torch.float32, layout="NHD")
    rig = make_rig(source, make_cache(block_size=16, dtype=torch.bfloat16))
    lease = rig.reserve(b"a", 100)
    result = await send(sender_of(rig), rig, lease)
    assert result.outcome == Committed()
    assert rig.has_all(lease, lease.block_ids)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_frame_bytes": 0}, "max_frame_bytes"),
        ({"max_frame_bytes": (8 << 20) + 1}, "max_frame_bytes"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s"),
    ],
)
def test_a_setting_that_cannot_work_is_named(options: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SenderConfig(**options)
    assert caught.value.field == field
