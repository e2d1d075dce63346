"""What a router counts reaches a collector in buckets that tell its values apart."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from router.metrics import RouterMetrics
from router.queueing.buckets import BucketQueue


def test_what_waits_is_told_by_bucket_and_what_is_in_flight() -> None:
    queue: BucketQueue[str] = BucketQueue((100, 1000), max_items=10, max_wait_s=5.0)
    for name, num_tokens, cost_ms in (("a", 50, 20.0), ("b", 60, 30.0), ("c", 5_000, 1_500.0)):
        queue.push(name, num_tokens, enqueued_at=0.0, deadline_at=1.0, cost_ms=cost_ms)
    reader = InMemoryMetricReader()
    metrics = RouterMetrics(MeterProvider(metric_readers=[reader]).get_meter("baton"))
    metrics.watch_load(queue.waiting_ms, lambda: 7)

    def told() -> dict[str, dict[str, float]]:
        data: Any = reader.get_metrics_data()
        found = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
        return {m.name: {p.attributes.get("bucket", ""): p.value for p in m.data.data_points} for m in found}

    assert told() == {
        "baton.router.queued": {"0": 0.05, "1": 0.0, "2": 1.5},
        "baton.router.requests": {"": 7},
    }
    queue.set_edges((55,))
    assert told()["baton.router.queued"] == {"0": 0.02, "1": 1.53}
    queue.drain()
    assert set(told()["baton.router.queued"].values()) == {0.0}


def test_waits_of_milliseconds_and_of_seconds_fall_into_buckets_of_their_own() -> None:
    reader = InMemoryMetricReader()
    metrics = RouterMetrics(MeterProvider(metric_readers=[reader]).get_meter("baton"))
    for queue_s in (0.002, 0.02, 0.2, 2.0, 20.0):
        metrics.placed("remote", "normal", queue_s)
        metrics.regretted("remote", 1000 * queue_s)
    data: Any = reader.get_metrics_data()
    found = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    for name in ("baton.router.queue.duration", "baton.router.regret"):
        (point,) = found[name].data.data_points
        assert [count for count in point.bucket_counts if count] == [1, 1, 1, 1, 1], name
        assert found[name].unit == "s"
    assert all(metric.description for metric in found.values())
