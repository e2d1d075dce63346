"""The messages of KvTransferService, between bytes and the values of kvtransfer/contract.py.

Owns every protobuf type that kvtransfer touches. Must not know channels, servers
or leases.

Frames bypass the protobuf runtime: it would copy each one four times, which cut
the measured throughput of a 1 MiB stream to a third. What goes over the wire is
plain protobuf all the same: `bytes frame = 2` is one tag byte, a length, and the
bytes as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from baton.errors import InvalidRequest
from baton.v1 import common_pb2, kv_transfer_service_pb2
from kvtransfer.contract import (
    ITEM_BYTES,
    Answer,
    Committed,
    FirstToken,
    Gone,
    GoneReason,
    KvFormat,
    Layout,
    Resend,
    Ticket,
)
from kvtransfer.slots import Sender
from kvtransfer.token_events import read_first_token, write_first_token

WriteRequest = kv_transfer_service_pb2.WriteRequest
WriteResponse = kv_transfer_service_pb2.WriteResponse

_REASONS = {reason.value: reason for reason in GoneReason}
_FRAME_TAG = b"\x12"  # field 2, length-delimited


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots the sender may write into, from now on."""

    slots: tuple[int, ...]


def encode_frame(header: bytes, runs: Sequence[memoryview]) -> bytes:
    """A serialized WriteRequest whose `frame` is header ++ payload; one copy.

    runs: the payload in pieces, in order.
    """
    num_bytes = len(header) + sum(run.nbytes for run in runs)
    return b"".join((_FRAME_TAG, _varint(num_bytes), header, *runs))


def decode_request(data: bytes) -> WriteRequest | memoryview:
    """A frame as a view of `data`, or any other WriteRequest; raises protobuf's DecodeError."""
    if data[:1] == _FRAME_TAG:
        start = _frame_start(data)
        # Anything else behind the frame is legal protobuf, if strange; the runtime takes it.
        if start is not None:
            return memoryview(data)[start:]
    request = WriteRequest.FromString(data)
    return memoryview(request.frame) if request.WhichOneof("message") == "frame" else request


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _frame_start(data: bytes) -> int | None:
    """Where the frame begins if it reaches to the very end of the message."""
    length = 0
    # A length in 5 bytes has 35 bits, more than any message may have.
    for offset, byte in enumerate(data[1:6]):
        length |= (byte & 0x7F) << (7 * offset)
        if byte < 0x80:
            start = offset + 2
            return start if start + length == len(data) else None
    return None


def write_format(fmt: KvFormat) -> kv_transfer_service_pb2.KvFormat:
    """The message for a format."""
    return kv_transfer_service_pb2.KvFormat(
        dtype=fmt.dtype,
        layout=fmt.layout,
        block_size=fmt.block_size,
        num_layers=fmt.num_layers,
        num_kv_heads=fmt.num_kv_heads,
        head_dim=fmt.head_dim,
    )


def encode_open(
    ticket: Ticket, sender: Sender, wanted_slots: int, open_attempts: Iterable[bytes] = ()
) -> bytes:
    """A serialized WriteRequest that opens a write.

    open_attempts: others of this sender that may still write into slots of this receiver.
    """
    message = kv_transfer_service_pb2.OpenWrite(
        lease_id=ticket.lease_id,
        attempt_id=ticket.attempt_id,
        incarnation=ticket.incarnation,
        format=write_format(ticket.format),
        traceparent=ticket.traceparent,
        wanted_slots=wanted_slots,
        sender=sender.name,
        sender_incarnation=sender.incarnation,
        open_attempts=open_attempts,
    )
    return WriteRequest(open=message).SerializeToString()


def read_format(fmt: kv_transfer_service_pb2.KvFormat) -> KvFormat:
    """The format in a message; raises InvalidRequest naming the field."""
    if fmt.dtype not in ITEM_BYTES:
        raise InvalidRequest(
            f"dtype is {fmt.dtype!r}; it must be one of {', '.join(ITEM_BYTES)}", field="dtype"
        )
    if fmt.layout not in ("HND", "NHD"):
        raise InvalidRequest(f"layout is {fmt.layout!r}; it must be HND or NHD", field="layout")
    for field in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
        # 16 bits is what a frame's header has for each.
        if not 1 <= getattr(fmt, field) < 1 << 16:
            raise InvalidRequest(f"{field} is {getattr(fmt, field)}; it must be in 1..65535", field=field)
    return KvFormat(
        dtype=fmt.dtype,
        layout=cast(Layout, fmt.layout),
        block_size=fmt.block_size,
        num_layers=fmt.num_layers,
        num_kv_heads=fmt.num_kv_heads,
        head_dim=fmt.head_dim,
    )


def decode_open(message: kv_transfer_service_pb2.OpenWrite) -> Ticket:
    """The ticket of an open; raises InvalidRequest naming the field."""
    return Ticket(
        lease_id=message.lease_id,
        attempt_id=message.attempt_id,
        incarnation=message.incarnation,
        format=read_format(message.format),
        traceparent=message.traceparent,
    )


def sender_of(message: kv_transfer_service_pb2.OpenWrite) -> Sender:
    """Who opens the write."""
    return Sender(message.sender, message.sender_incarnation)


def encode_placed(slots: Sequence[int], headers: Sequence[bytes]) -> bytes:
    """A serialized WriteRequest for frames whose payload lies in slots."""
    placed = kv_transfer_service_pb2.PlacedFrames(slots=slots, headers=headers)
    return WriteRequest(placed=placed).SerializeToString()


def encode_quiet() -> bytes:
    """A serialized WriteRequest that says: nothing writes into the slots any more."""
    return WriteRequest(quiet=True).SerializeToString()


def encode_grant(slots: Sequence[int]) -> WriteResponse:
    """The response that gives slots to the sender."""
    return WriteResponse(granted=kv_transfer_service_pb2.SlotGrant(slots=slots))


def encode_commit(num_frames: int, attempt_id: bytes, token: FirstToken) -> bytes:
    """A serialized WriteRequest that commits."""
    event = write_first_token(attempt_id, token)
    message = kv_transfer_service_pb2.CommitWrite(num_frames=num_frames, first_token=event)
    return WriteRequest(commit=message).SerializeToString()


def decode_commit(message: kv_transfer_service_pb2.CommitWrite) -> FirstToken:
    """The first token of a commit; raises InvalidRequest unless there is exactly one."""
    return read_first_token(message.first_token)


def encode_answer(answer: Answer) -> WriteResponse:
    """The response for an answer."""
    match answer:
        case Committed(verify_s, convert_s):
            times = kv_transfer_service_pb2.WriteCommitted(
                verify_ms=1000 * verify_s, convert_ms=1000 * convert_s
            )
            return WriteResponse(committed=times)
        case Gone(reason):
            return WriteResponse(gone=to_wire_reason(reason))
        case Resend(indices):
            return WriteResponse(resend=kv_transfer_service_pb2.ResendFrames(indices=indices))


def decode_response(response: WriteResponse) -> Answer | Grant | None:
    """What a response says; None if it is of a kind this version does not know."""
    match response.WhichOneof("message"):
        case "committed":
            times = response.committed
            return Committed(verify_s=times.verify_ms / 1000, convert_s=times.convert_ms / 1000)
        case "gone":
            return Gone(from_wire_reason(response.gone))
        case "resend":
            return Resend(tuple(response.resend.indices))
        case "granted":
            return Grant(tuple(response.granted.slots))
        case _:
            return None


def to_wire_reason(reason: GoneReason) -> common_pb2.GoneReason.ValueType:
    """baton.v1.GoneReason for a reason."""
    return common_pb2.GoneReason.Value(f"GONE_REASON_{reason.name}")


def from_wire_reason(reason: int) -> GoneReason:
    """The reason for a baton.v1.GoneReason; a value this version does not know becomes UNKNOWN."""
    return _REASONS.get(reason, GoneReason.UNKNOWN)
