"""Traces: which part of a request's time went where, across processes.

Owns this process's tracer and its exporters: OTLP when the standard
OTEL_EXPORTER_OTLP_* variables name an endpoint, a file of JSON lines when one is
configured, otherwise nothing at all. It must never see a prompt or a completion:
callers pass counts, names and times.

A span's parent is always passed as a W3C traceparent string, which also travels
in commands. Nothing is attached to a context: a context attached inside a
generator is detached in another task when the stream is left early.

    span = start_span("QUEUED", parent=command.traceparent, attributes={"num_prompt_tokens": 812})
    try:
        ...
    except BatonError as error:
        span.fail(error)
        raise
    finally:
        span.end()
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.errors import BatonError, ConfigError

AttributeValue = str | int | float | bool
ROOT_SPAN: Final = "generate"

_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Span:
    """A piece of one request's time. Without a tracer every method does nothing.

    traceparent: what a child names as its parent; without a tracer the parent's own, or "".
    """

    __slots__ = ("_inner", "traceparent")

    def __init__(self, inner: trace.Span | None, traceparent: str) -> None:
        self._inner = inner
        self.traceparent = traceparent

    def set(self, **attributes: AttributeValue) -> None:
        """Adds attributes; after the end it does nothing."""
        if self._inner is not None and self._inner.is_recording():
            self._inner.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        """Marks it as failed, by the error's code or type; the message may hold a user's words."""
        if self._inner is not None and self._inner.is_recording():
            kind = error.code if isinstance(error, BatonError) else type(error).__name__
            self._inner.set_attribute("error.type", kind)
            self._inner.set_status(trace.StatusCode.ERROR, kind)

    def end(self) -> None:
        """Ends it now. Idempotent."""
        if self._inner is not None and self._inner.is_recording():
            self._inner.end()


@dataclass(slots=True)
class _Tracing:
    """What configure_tracing() sets up for the process."""

    provider: TracerProvider | None = None
    tracer: trace.Tracer | None = None


_tracing = _Tracing()


class TraceFile(SpanExporter):
    """A file that takes one JSON line per finished span; several processes may share it.

    {"trace_id", "span_id", "parent_id" (null at the root), "name", "service", "instance",
     "start_unix_ns", "end_unix_ns", "attributes", "status" ("UNSET" or "ERROR")}
    """

    def __init__(self, path: str) -> None:
        """Opens the file; raises ConfigError when that fails."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = f"trace file {path} cannot be opened: {error.strerror}"
            raise ConfigError(message, field="trace_file") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes each span with one write, which the kernel appends whole."""
        try:
            for span in spans:
                os.write(self._fd, (json.dumps(_as_record(span), default=str) + "\n").encode())
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def configure_tracing(service_name: str, instance: str, trace_file: str | None = None) -> None:
    """Sets up tracing for this process, at its entry point; calling again replaces the set-up.

    Args:
        service_name: the role, for example "baton-router".
        instance: the process, for example "router-0".
        trace_file: path of a file of JSON lines to append to.

    Raises:
        ConfigError: the trace file cannot be opened.
    """
    shutdown_tracing()
    wants_otlp = any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    if trace_file is None and not wants_otlp:
        return
    file = TraceFile(trace_file) if trace_file is not None else None
    resource = Resource.create({"service.name": service_name, "service.instance.id": instance})
    # The SDK's own exit handler may wait for half a minute; shutdown_tracing() has a deadline.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if file is not None:
        # Written at once, so that a process that is killed leaves what it had finished.
        provider.add_span_processor(SimpleSpanProcessor(file))
    if wants_otlp:
        provider.add_span_processor(_otlp_processor())
    _tracing.provider = provider
    _tracing.tracer = provider.get_tracer("baton")


def start_span(
    name: str, *, parent: str | None = None, attributes: Mapping[str, AttributeValue] | None = None
) -> Span:
    """Starts a span now; the caller must end() it.

    Args:
        name: name of a RequestStatus, or ROOT_SPAN.
        parent: W3C traceparent of the span above; None, or one that cannot be read, starts a new trace.
        attributes: counts and names; never a user's words.
    """
    if _tracing.tracer is None:
        return Span(None, parent or "")
    above = _PROPAGATOR.extract({"traceparent": parent} if parent else {}, context=Context())
    inner = _tracing.tracer.start_span(name, context=above, attributes=attributes)
    context = inner.get_span_context()
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return Span(inner, traceparent)


def shutdown_tracing(deadline_s: float = 5.0) -> None:
    """Exports what is finished and ends tracing, waiting for at most deadline_s seconds. Idempotent."""
    provider, _tracing.provider, _tracing.tracer = _tracing.provider, None, None
    if provider is not None:
        close_within(provider.shutdown, deadline_s)


def close_within(close: Callable[[], object], deadline_s: float) -> None:
    """Calls what closes an exporter, and waits for at most deadline_s seconds.

    A collector that does not answer would hold the SDK's shutdown far longer.
    """
    closing = threading.Thread(target=close, name="baton-telemetry-shutdown", daemon=True)
    closing.start()
    closing.join(deadline_s)


def _otlp_processor() -> BatchSpanProcessor:
    # Imported here because it triples the start time of every command that does not trace.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return BatchSpanProcessor(OTLPSpanExporter())


def _as_record(span: ReadableSpan) -> dict[str, Any]:
    context, resource = span.get_span_context(), span.resource.attributes
    assert context is not None, "a finished span has a context"
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent is not None else None,
        "name": span.name,
        "service": resource.get("service.name"),
        "instance": resource.get("service.instance.id"),
        "start_unix_ns": span.start_time,
        "end_unix_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "status": span.status.status_code.name,
    }
