"""Metrics: what a process counts and times, for a collector.

Owns this process's meter provider. Metrics go out over OTLP when the standard OTEL_EXPORTER_OTLP_*
variables name an endpoint; otherwise instruments cost next to nothing. It must never see a prompt,
a completion or anything else without a bound: attributes are names of workers, roles and outcomes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from baton.telemetry import close_within

_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

# Bounds of histograms: from a placement to a long wait, in seconds; and shares.
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(slots=True)
class _Metrics:
    """What configure_metrics() sets up for the process."""

    provider: MeterProvider | None = None


_metrics = _Metrics()


def configure_metrics(service_name: str, instance: str, reader: MetricReader | None = None) -> None:
    """Sets up metrics for this process, at its entry point; calling again replaces the set-up.

    Args:
        service_name: the role, for example "baton-prefill".
        instance: the process, for example "prefill-0".
        reader: takes the metrics as well, whether or not there is a collector.
    """
    shutdown_metrics()
    readers = [] if reader is None else [reader]
    if any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        readers.append(_otlp_reader())
    if readers:
        resource = Resource.create({"service.name": service_name, "service.instance.id": instance})
        _metrics.provider = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)


def meter() -> Meter:
    """What makes this process's instruments; call it after configure_metrics()."""
    if _metrics.provider is None:
        return NoOpMeter("baton")
    return _metrics.provider.get_meter("baton")


def shutdown_metrics(deadline_s: float = 5.0) -> None:
    """Exports what there is and ends metrics, waiting for at most deadline_s seconds. Idempotent."""
    provider, _metrics.provider = _metrics.provider, None
    if provider is not None:
        close_within(provider.shutdown, deadline_s)


def _otlp_reader() -> MetricReader:
    # Imported here because it triples the start time of every command that does not export.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415

    return PeriodicExportingMetricReader(OTLPMetricExporter())
