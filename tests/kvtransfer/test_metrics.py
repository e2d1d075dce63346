"""What a collector sees of transfers: the seconds and bytes of the same attempt, by bounded names."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from baton.errors import PeerLost
from kvtransfer.contract import Committed, Gone, GoneReason
from kvtransfer.metrics import SendMetrics, observe_slots, observe_totals
from kvtransfer.sender import TransferOutcome
from kvtransfer.slots import Sender, SlotTable
from kvtransfer.transfer_times import TransferTimes


def collected(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: list(metric.data.data_points) for metric in metrics}


def test_a_transfers_seconds_and_bytes_are_recorded_together() -> None:
    reader = InMemoryMetricReader()
    metrics = SendMetrics(MeterProvider(metric_readers=[reader], shutdown_on_exit=False).get_meter("baton"))
    times = TransferTimes(open_s=0.001, wait_s=0.002, prepare_s=0.25, wire_s=0.5, commit_s=0.125)
    metrics.transferred(
        "shm",
        TransferOutcome(outcome=Committed(), num_bytes=1000, duration_s=2.0, hidden_share=0.75, times=times),
    )
    metrics.transferred(
        "grpc", TransferOutcome(outcome=Gone(GoneReason.EXPIRED), num_bytes=10, duration_s=1.0)
    )
    metrics.failed("nixl", PeerLost("gone"))
    metrics.paired("shm", 0.5)
    found = collected(reader)
    outcomes = {
        (p.attributes["transport"], p.attributes["outcome"]): p.sum
        for p in found["baton.kv.transfer.duration"]
    }
    assert outcomes == {
        ("shm", "committed"): 2.0,
        ("grpc", "gone_expired"): 1.0,
    }
    (failed,) = found["baton.kv.transfer.failed"]
    assert (failed.value, dict(failed.attributes)) == (1, {"transport": "nixl", "outcome": "peer_lost"})
    sizes = {p.attributes["transport"]: p.value for p in found["baton.kv.transfer.size"]}
    assert sizes == {"shm": 1000, "grpc": 10}
    parts = {
        p.attributes["part"]: p.sum
        for p in found["baton.kv.transfer.part"]
        if p.attributes["transport"] == "shm"
    }
    assert parts == {
        "open": 0.001,
        "wait": 0.002,
        "prepare": 0.25,
        "wire": 0.5,
        "verify": 0.0,
        "convert": 0.0,
        "commit": 0.125,
    }
    (paired,) = found["baton.kv.pair.duration"]
    assert (paired.sum, dict(paired.attributes)) == (0.5, {"transport": "shm"})


def test_totals_and_slots_are_read_when_they_are_collected() -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider(metric_readers=[reader], shutdown_on_exit=False).get_meter("baton")
    totals = {"expired_leases": 2}
    slots = SlotTable(5)
    observe_totals(meter, "receiver", lambda: totals)
    observe_slots(meter, slots.counts)
    totals["bad_frame_digest"] = 3
    slots.grant("a", Sender("prefill-0", 1), 2, 0.0)
    slots.grant("b", Sender("prefill-0", 1), 1, 0.0)
    slots.end("b", 0.0, is_quiet=False)
    found = collected(reader)
    counts = {p.attributes["kind"]: p.value for p in found["baton.kv.receiver.total"]}
    assert counts == {"expired_leases": 2, "bad_frame_digest": 3}
    states = {p.attributes["state"]: p.value for p in found["baton.kv.slots"]}
    assert states == {"free": 2, "held": 2, "quarantined": 1, "retired": 0}
