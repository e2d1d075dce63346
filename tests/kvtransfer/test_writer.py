"""What a broken stream means."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from baton.errors import IncompatiblePeer, KvTransferFailed, PeerLost
from kvtransfer.transports.writer import end_of


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
