"""What a router counts reaches a collector in buckets that tell its values apart."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from router.metrics import RouterMetrics


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
