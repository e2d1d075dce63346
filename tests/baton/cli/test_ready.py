"""`baton ready` against the health service that routers have."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)


class Health:
    def __init__(self, servicer: health.HealthServicer, address: str) -> None:
        self.address = address
        self._servicer = servicer
        self.set(ready=False)

    def set(self, *, ready: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        self._servicer.set("", statuses.SERVING if ready else statuses.NOT_SERVING)


class Refusing(InferenceServiceServicer):
    """A router that wants an API key, which does not matter here."""

    def ListModels(self, request, context):  # noqa: N802
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who?")


@contextmanager
def serving(*, is_public: bool) -> Iterator[Health]:
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if is_public:
        add_InferenceServiceServicer_to_server(Refusing(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield Health(servicer, address)
    server.stop(0).wait()


@pytest.fixture
def port() -> Iterator[Health]:
    with serving(is_public=True) as public:
        yield public


def test_ready_is_exit_code_0(baton, port) -> None:
    port.set(ready=True)
    ran = baton("ready", "--address", port.address)
    assert (ran.code, ran.out) == (0, "ready\n")


def test_not_yet_is_exit_code_4(baton, port) -> None:
    ran = baton("ready", "--address", port.address)
    assert (ran.code, ran.out) == (4, "not ready\n")


def test_nothing_there_is_exit_code_3(baton) -> None:
    ran = baton("ready", "--address", "127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    assert "no router answers at 127.0.0.1:1" in ran.err


def test_somebody_else_there_is_exit_code_3(baton, router) -> None:
    # A server without the service of health.
    ran = baton("ready", "--address", router.address)
    assert (ran.code, ran.out) == (3, "")
    assert f"{router.address} is not a router's public port" in ran.err


def test_another_port_of_a_router_is_exit_code_3(baton) -> None:
    # It says of itself that it serves, which is true.
    with serving(is_public=False) as admin:
        admin.set(ready=True)
        ran = baton("ready", "--address", admin.address)
    assert (ran.code, ran.out) == (3, "")
    assert f"{admin.address} is not a router's public port" in ran.err


def test_json(baton, port) -> None:
    ran = baton("ready", "--json", "--address", port.address)
    assert (ran.code, json.loads(ran.out)) == (4, {"address": port.address, "ready": False})


def test_it_waits_until_it_is_ready(baton, port, monkeypatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr("baton.readiness.POLL_S", 0.02)
    monkeypatch.setattr("baton.cli.progress_lines.ProgressLines.show", lambda *_: asked.set())

    def become_ready() -> None:
        asked.wait(10)
        port.set(ready=True)

    thread = threading.Thread(target=become_ready)
    thread.start()
    ran = baton("ready", "--wait", "20", "--address", port.address)
    thread.join()
    assert (ran.code, ran.out) == (0, "ready\n")
    assert asked.is_set()


def test_the_wait_ends(baton, port) -> None:
    ran = baton("ready", "--wait", "0.1", "--address", port.address)
    assert (ran.code, ran.out) == (4, "not ready\n")
    assert "not ready yet" in ran.err
