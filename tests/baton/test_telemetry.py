"""Spans of several processes form one trace through a string; without exporters nothing happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.errors import ConfigError, Overloaded
from baton.telemetry import configure_tracing, shutdown_tracing, start_span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def no_tracing_before_or_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    yield
    shutdown_tracing()


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_finished_span_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    configure_tracing("baton-router", "router-0", str(path))
    before_ns = time.time_ns()
    span = start_span("QUEUED", parent=PARENT, attributes={"num_prompt_tokens": 812})
    span.set(bucket="512-1023", is_resumed=False)
    assert path.read_text() == ""
    span.end()
    span.end()
    span.set(late=True)
    (record,) = records(path)
    assert before_ns <= record.pop("start_unix_ns") <= record.pop("end_unix_ns") <= time.time_ns()
    span_id = record.pop("span_id")
    assert record == {
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "parent_id": "b7ad6b7169203331",
        "name": "QUEUED",
        "service": "baton-router",
        "instance": "router-0",
        "attributes": {"num_prompt_tokens": 812, "bucket": "512-1023", "is_resumed": False},
        "status": "UNSET",
    }
    assert span.traceparent == f"00-0af7651916cd43dd8448eb211c80319c-{span_id}-01"


def test_two_processes_write_one_trace_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    configure_tracing("baton-router", "router-0", str(path))
    root = start_span("generate")
    script = (
        "import sys\n"
        "from baton.telemetry import configure_tracing, shutdown_tracing, start_span\n"
        "configure_tracing('baton-prefill', 'prefill-0', sys.argv[1])\n"
        "start_span('PREFILLING', parent=sys.argv[2]).end()\n"
        "shutdown_tracing()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path), root.traceparent], check=True)
    root.end()
    worker, router = records(path)
    assert (worker["name"], worker["service"]) == ("PREFILLING", "baton-prefill")
    assert (router["name"], router["service"], router["parent_id"]) == ("generate", "baton-router", None)
    assert worker["trace_id"] == router["trace_id"]
    assert worker["parent_id"] == router["span_id"]


def test_spans_that_run_at_once_do_not_become_each_others_parents(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    configure_tracing("s", "i", str(path))
    one = start_span("generate")
    two = start_span("generate")
    two.end()
    one.end()
    assert [record["parent_id"] for record in records(path)] == [None, None]
    assert len({record["trace_id"] for record in records(path)}) == 2


def test_a_failure_tells_its_code_and_not_its_message(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    configure_tracing("s", "i", str(path))
    for error in (Overloaded("a user's words"), ZeroDivisionError("a user's words")):
        span = start_span("DECODING")
        span.fail(error)
        span.end()
    assert [record["status"] for record in records(path)] == ["ERROR", "ERROR"]
    kinds = [record["attributes"] for record in records(path)]
    assert kinds == [{"error.type": "OVERLOADED"}, {"error.type": "ZeroDivisionError"}]
    assert "words" not in path.read_text()


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-é"])
def test_a_parent_that_cannot_be_read_starts_a_new_trace(tmp_path: Path, parent: str) -> None:
    path = tmp_path / "trace.jsonl"
    configure_tracing("s", "i", str(path))
    start_span("generate", parent=parent).end()
    assert records(path)[0]["parent_id"] is None


def test_without_exporters_the_parent_is_handed_on_and_nothing_is_left(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    configure_tracing("baton-router", "router-0", None)
    span = start_span("QUEUED", parent=PARENT)
    span.set(a=1)
    span.fail(ValueError())
    span.end()
    assert span.traceparent == PARENT
    assert start_span("generate").traceparent == ""
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) == threads


def test_without_exporters_a_span_costs_a_few_microseconds() -> None:
    start = time.perf_counter()
    for _ in range(1000):
        start_span("DECODING", parent=PARENT).end()
    assert time.perf_counter() - start < 0.05


def test_a_trace_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        configure_tracing("s", "i", str(tmp_path / "no" / "such" / "folder"))
    assert caught.value.field == "trace_file"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(  # noqa: N802 -- the method's name on the wire
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_otlp_is_used_when_the_standard_variable_names_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    configure_tracing("baton-decode", "decode-3")
    span = start_span("DECODING", parent=PARENT)
    span.end()
    shutdown_tracing()
    server.stop(0).wait()
    (resource_spans,) = collector.requests[0].resource_spans
    attributes = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    (exported,) = resource_spans.scope_spans[0].spans
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("baton-decode", "decode-3")
    assert exported.trace_id.hex() == PARENT.split("-")[1]


def test_a_collector_that_is_not_there_delays_the_shutdown_by_the_deadline_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9")
    configure_tracing("s", "i")
    start_span("generate").end()
    start = time.monotonic()
    shutdown_tracing(deadline_s=0.2)
    assert time.monotonic() - start < 1.5
