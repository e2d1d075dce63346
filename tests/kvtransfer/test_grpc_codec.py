"""Hand-made frame messages against protobuf's own reading and writing."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from baton.v1 import common_pb2, kv_transfer_service_pb2
from kvtransfer.contract import Committed, FirstToken, Gone, GoneReason, KvFormat, Resend, Ticket
from kvtransfer.slots import Sender
from kvtransfer.transports import grpc_codec

FORMAT = KvFormat(dtype="bfloat16", layout="NHD", block_size=16, num_layers=24, num_kv_heads=2, head_dim=64)
TICKET = Ticket(
    lease_id=b"l" * 16, attempt_id=b"a" * 16, incarnation=2**64 - 1, format=FORMAT, traceparent="00-1"
)
SENDER = Sender("prefill-0", 2**64 - 2)


@pytest.mark.parametrize("num_bytes", [0, 1, 75, 76, 127, 128, 16_383, 16_384, 300_000])
def test_a_frame_is_what_protobuf_would_write_and_reads_back_without_a_copy(num_bytes: int) -> None:
    header, payload = b"h" * 52, memoryview(bytes(range(256)) * 1200)[:num_bytes]
    data = grpc_codec.encode_frame(header, [payload[:5], payload[5:]])
    assert data == kv_transfer_service_pb2.WriteRequest(frame=header + payload).SerializeToString()
    frame = grpc_codec.decode_request(data)
    assert isinstance(frame, memoryview)
    assert frame.obj is data
    assert frame == header + payload


def test_unusual_but_legal_encodings_of_a_frame_are_understood() -> None:
    usual = kv_transfer_service_pb2.WriteRequest(frame=b"abc").SerializeToString()
    commit = kv_transfer_service_pb2.WriteRequest(commit={"num_frames": 1}).SerializeToString()
    # Of several members of a oneof, the last one counts.
    assert grpc_codec.decode_request(usual + usual) == b"abc"
    assert grpc_codec.decode_request(commit + usual) == b"abc"
    request = grpc_codec.decode_request(usual + commit)
    assert isinstance(request, kv_transfer_service_pb2.WriteRequest)
    assert request.commit.num_frames == 1


@pytest.mark.parametrize("data", [b"\x12", b"\x12\x05abc", b"\x12" + b"\xff" * 12])
def test_a_truncated_frame_message_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        grpc_codec.decode_request(data)


def test_a_ticket_survives_the_wire() -> None:
    request = grpc_codec.decode_request(grpc_codec.encode_open(TICKET, SENDER, 3))
    assert isinstance(request, kv_transfer_service_pb2.WriteRequest)
    assert grpc_codec.decode_open(request.open) == TICKET
    assert grpc_codec.sender_of(request.open) == SENDER
    assert request.open.wanted_slots == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int4"), ("layout", "DHN"), ("block_size", 0), ("num_layers", 65_536), ("head_dim", 0)],
)
def test_a_format_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    request = kv_transfer_service_pb2.WriteRequest.FromString(grpc_codec.encode_open(TICKET, SENDER, 3))
    setattr(request.open.format, field, value)
    with pytest.raises(InvalidRequest) as caught:
        grpc_codec.decode_open(request.open)
    assert caught.value.field == field


def test_a_commit_carries_exactly_one_token() -> None:
    token = FirstToken(token_id=9, logprob=-0.5, start_index=3)
    request = kv_transfer_service_pb2.WriteRequest.FromString(grpc_codec.encode_commit(5, b"a", token))
    assert request.commit.num_frames == 5
    assert grpc_codec.decode_commit(request.commit) == token
    for count in (0, 2):
        with pytest.raises(InvalidRequest):
            grpc_codec.decode_commit(
                kv_transfer_service_pb2.CommitWrite(first_token={"token_ids": [1] * count})
            )


@pytest.mark.parametrize("answer", [Committed(), Resend((0, 7)), *(Gone(reason) for reason in GoneReason)])
def test_answers_survive_the_wire(answer: Committed | Gone | Resend) -> None:
    assert grpc_codec.decode_response(grpc_codec.encode_answer(answer)) == answer


@pytest.mark.parametrize("slots", [(), (3, 1)])
def test_grants_survive_the_wire(slots: tuple[int, ...]) -> None:
    data = grpc_codec.encode_grant(slots).SerializeToString()
    response = kv_transfer_service_pb2.WriteResponse.FromString(data)
    assert grpc_codec.decode_response(response) == grpc_codec.Grant(slots)


def test_the_times_of_a_commit_survive_the_wire() -> None:
    answer = grpc_codec.decode_response(grpc_codec.encode_answer(Committed(verify_s=0.25, convert_s=1.5)))
    assert isinstance(answer, Committed)
    assert (answer.verify_s, answer.convert_s) == (0.25, 1.5)


def test_a_response_of_an_unknown_kind_says_nothing() -> None:
    assert grpc_codec.decode_response(kv_transfer_service_pb2.WriteResponse()) is None


def test_placed_frames_and_quiet_are_plain_protobuf() -> None:
    request = grpc_codec.decode_request(grpc_codec.encode_placed([4, 2], [b"h1", b"h2"]))
    assert isinstance(request, kv_transfer_service_pb2.WriteRequest)
    assert (list(request.placed.slots), list(request.placed.headers)) == ([4, 2], [b"h1", b"h2"])
    quiet = grpc_codec.decode_request(grpc_codec.encode_quiet())
    assert isinstance(quiet, kv_transfer_service_pb2.WriteRequest)
    assert quiet.WhichOneof("message") == "quiet"


def test_reasons_have_the_names_of_the_contract() -> None:
    names = {name.removeprefix("GONE_REASON_"): number for name, number in common_pb2.GoneReason.items()}
    assert names == {"UNSPECIFIED": 0, **{reason.name: reason.value for reason in GoneReason}}
    assert grpc_codec.from_wire_reason(0) is GoneReason.UNKNOWN
    assert grpc_codec.from_wire_reason(99) is GoneReason.UNKNOWN
