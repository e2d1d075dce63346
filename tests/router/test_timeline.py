"""The summary of a request's time: what the prefill worker reports reaches the client."""

from __future__ import annotations

from baton.answer import Timings, TransferTimes
from baton.v1 import common_pb2, prefill_service_pb2
from router.timeline import Timeline

PARTS = {
    "open_ms": 1.0,
    "wait_ms": 2.0,
    "prepare_ms": 4.0,
    "wire_ms": 8.0,
    "verify_ms": 16.0,
    "convert_ms": 32.0,
    "commit_ms": 64.0,
}


async def test_the_parts_of_the_transfer_are_those_of_the_last_attempt() -> None:
    timeline = Timeline(0.0, "<128")
    timeline.dispatched("prefill-0", "decode-0")
    timeline.prefill_ended(prefill_service_pb2.PrefillEnded(transfer_times={"open_ms": 9.0, "wait_ms": 9.0}))
    timeline.dispatched("prefill-1", "decode-1")
    timeline.prefill_ended(
        prefill_service_pb2.PrefillEnded(
            committed=True,
            transfer_ms=90.0,
            transfer_times=common_pb2.TransferTimes(**PARTS),
            transfer_hidden_share=0.75,
        )
    )
    timings = Timings.from_proto(timeline.timings())
    assert timings.transfer_times == TransferTimes(**PARTS)
    assert (timings.transfer_ms, timings.transfer_hidden_share) == (90.0, 0.75)
    assert (timings.prefill_worker, timings.decode_worker) == ("prefill-1", "decode-1")


async def test_without_a_transfer_its_parts_took_no_time() -> None:
    timeline = Timeline(0.0, "<128")
    timeline.prefill_ended(prefill_service_pb2.PrefillEnded(finished=True))
    timings = Timings.from_proto(timeline.timings())
    assert timings.transfer_times == TransferTimes(**dict.fromkeys(PARTS, 0.0))
    assert timings.transfer_hidden_share == 0.0
