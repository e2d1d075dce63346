"""One incoming write at a time, driven by hand: what is admitted, refused, asked for again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton.errors import IncompatiblePeer
from kvtransfer.contract import Committed, Gone, GoneReason, Outcome, Resend, Ticket
from kvtransfer.lease_table import Lease, LeaseState
from kvtransfer.outgoing import CacheFrame, HostReader
from kvtransfer.receiver import IncomingWrite
from kvtransfer.scatter import format_of
from tests.kvtransfer.rig import INCARNATION, TOKEN, Rig, make_cache, make_rig, plan_frames

torch.set_num_threads(1)

Sent = tuple[bytes, memoryview]


def ticket_of(rig: Rig, lease: Lease[str]) -> Ticket:
    return Ticket(
        lease_id=lease.lease_id,
        attempt_id=lease.attempt_id,
        incarnation=INCARNATION,
        format=format_of(rig.source.shape),
    )


def open_write(rig: Rig, lease: Lease[str], heard: list[Gone] | None = None) -> IncomingWrite[str]:
    write = rig.receiver.open(ticket_of(rig, lease), 0.0, (heard if heard is not None else []).append)
    assert isinstance(write, IncomingWrite)
    return write


def frames_of(rig: Rig, num_tokens: int, num_held_tokens: int = 0) -> list[Sent]:
    fmt = format_of(rig.source.shape)
    frames: list[Sent] = []
    for spec in plan_frames(
        fmt, num_tokens=num_tokens, num_held_tokens=num_held_tokens, max_frame_bytes=fmt.layer_block_bytes
    ):
        frame = CacheFrame(HostReader(rig.source), rig.source_blocks, spec)
        frames.append((frame.header(), memoryview(b"".join(frame.runs()))))
    return frames


def feed(write: IncomingWrite[str], frames: list[Sent]) -> None:
    for frame in frames:
        assert write.frame(*frame, 0.0) is None


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 1, 3, 2, 2, 3]])
def test_any_order_and_duplicates_commit(order: list[int]) -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 20)
    write = open_write(rig, lease)
    frames = frames_of(rig, 20)
    feed(write, [frames[index] for index in order])
    assert write.commit(4, TOKEN, 0.0) == Committed()
    assert rig.has_all(lease, lease.block_ids)
    assert rig.committed == [("a", TOKEN)]
    assert rig.receiver.counters["duplicate_frames"] == len(order) - 4


def test_missing_frames_are_asked_for_by_number() -> None:
    rig = make_rig()
    write = open_write(rig, rig.reserve(b"a", 20))
    frames = frames_of(rig, 20)
    feed(write, [frames[1], frames[3]])
    assert write.commit(4, TOKEN, 0.0) == Resend((0, 2))
    feed(write, [frames[0], frames[2]])
    assert write.commit(4, TOKEN, 0.0) == Committed()


def test_a_commit_before_all_tokens_is_never_committed() -> None:
    # A sender that miscounts its frames must not get half a cache decoded.
    rig = make_rig()
    lease = rig.reserve(b"a", 20)
    write = open_write(rig, lease)
    feed(write, frames_of(rig, 20)[:3])
    assert write.commit(3, TOKEN, 0.0) == Gone(GoneReason.CORRUPT)
    assert rig.lost == [("a", "CORRUPT")]
    assert rig.committed == []
    assert rig.pool.num_free == 8


def test_an_absurd_number_of_frames_is_refused_at_once() -> None:
    rig = make_rig()
    write = open_write(rig, rig.reserve(b"a", 20))
    assert write.commit(2**32 - 1, TOKEN, 0.0) == Gone(GoneReason.CORRUPT)


def test_frames_outside_the_leases_tokens_are_dropped() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 20)
    write = open_write(rig, lease)
    feed(write, frames_of(rig, 80)[4:])
    assert rig.receiver.counters["bad_frame_tokens"] == 6
    assert bool((rig.cache.logical == -1).all())


def test_a_larger_block_that_is_partly_held_leaves_the_held_tokens_alone() -> None:
    rig = make_rig(make_cache(block_size=32))
    held = rig.pool.allocate(1)
    lease = rig.leases.reserve(b"a", "a", num_blocks=3, num_tokens=40, held_block_ids=held, now=0.0)
    assert isinstance(lease, Lease)
    write = open_write(rig, lease)
    frames = frames_of(rig, 40, num_held_tokens=16)
    feed(write, frames)
    assert write.commit(len(frames), TOKEN, 0.0) == Committed()
    untouched = torch.full((2, 2, 3, 5), -1.0).tolist()
    received = rig.tokens_of(rig.cache, lease.block_ids, 40)
    assert received[:16] == [untouched] * 16
    assert received[16:] == rig.tokens_of(rig.source, rig.source_blocks, 40)[16:]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"incarnation": INCARNATION + 1}, GoneReason.FENCED),
        ({"lease_id": bytes(16)}, GoneReason.UNKNOWN),
        ({"attempt_id": b"b"}, GoneReason.FENCED),
    ],
)
def test_a_write_without_the_right_ticket_is_refused(change: dict[str, object], reason: GoneReason) -> None:
    rig = make_rig()
    ticket = dataclasses.replace(ticket_of(rig, rig.reserve(b"a", 20)), **change)
    assert rig.receiver.open(ticket, 0.0, print) == Gone(reason)
    assert rig.leases.num_refused_writes == 1
    assert rig.receiver.num_open_writes == 0


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
def test_another_model_is_refused_by_the_name_of_the_field(field: str) -> None:
    rig = make_rig(cache=make_cache(**{field: 4}))
    lease = rig.reserve(b"a", 20)
    with pytest.raises(IncompatiblePeer) as caught:
        open_write(rig, lease)
    assert caught.value.field == field
    assert lease.state is LeaseState.RESERVED


def test_an_expired_lease_takes_no_frame_even_before_it_is_swept() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 20)
    write = open_write(rig, lease)
    frames = frames_of(rig, 20)
    assert write.frame(*frames[0], 9.9) is None
    before = rig.cache.logical.clone()
    assert write.frame(*frames[1], 10.0) == Gone(GoneReason.EXPIRED)
    assert write.commit(4, TOKEN, 10.0) == Gone(GoneReason.EXPIRED)
    assert torch.equal(rig.cache.logical, before)


def test_a_released_leases_stream_hears_it_and_its_frames_are_refused() -> None:
    rig = make_rig()
    heard: list[Gone] = []
    lease = rig.reserve(b"a", 20)
    write = open_write(rig, lease, heard)
    rig.leases.release(b"a", GoneReason.CANCELLED, 1.0)
    assert heard == [Gone(GoneReason.CANCELLED)]
    assert rig.receiver.num_open_writes == 0
    rig.reserve(b"b", 20)  # the same blocks, somebody else's
    assert write.frame(*frames_of(rig, 20)[0], 1.0) == Gone(GoneReason.CANCELLED)
    assert bool((rig.cache.logical == -1).all())
    write.close()
    assert rig.leases.num_refused_writes == 1


def test_a_newer_stream_fences_the_older_one() -> None:
    rig = make_rig()
    heard: list[Gone] = []
    lease = rig.reserve(b"a", 20)
    older, newer = open_write(rig, lease, heard), open_write(rig, lease)
    fenced: Outcome = Gone(GoneReason.FENCED)
    assert heard == [fenced]
    frames = frames_of(rig, 20)
    assert older.frame(*frames[0], 0.0) == fenced
    older.close()
    assert lease.state is LeaseState.RECEIVING
    feed(newer, frames)
    assert older.commit(4, TOKEN, 0.0) == fenced
    assert newer.commit(4, TOKEN, 0.0) == Committed()
    assert rig.receiver.num_open_writes == 0


def test_a_stream_that_starts_again_must_send_everything_again() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 20)
    frames = frames_of(rig, 20)
    first = open_write(rig, lease)
    feed(first, frames[:3])
    first.close()
    assert lease.state is LeaseState.RESERVED
    second = open_write(rig, lease)
    feed(second, frames[3:])
    assert second.commit(4, TOKEN, 0.0) == Resend((0, 1, 2))


def test_a_sender_that_missed_the_answer_gets_it_again() -> None:
    rig = make_rig()
    lease = rig.reserve(b"a", 20)
    write = open_write(rig, lease)
    feed(write, frames_of(rig, 20))
    write.commit(4, TOKEN, 0.0)
    assert rig.receiver.open(ticket_of(rig, lease), 0.0, print) == Committed()
    assert len(rig.committed) == 1
