"""The command run in this process, and a router that answers what the test tells it to."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from baton.cli.main import main
from baton.tls import TlsFiles
from baton.v1 import admin_service_pb2, common_pb2, inference_service_pb2
from baton.v1.admin_service_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from baton.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from tests.baton.cli.fake_control import FakeControl, serving
from tests.certificates import Authority


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def baton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, stdin: bytes | None = None, columns: int = 200) -> Ran:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin or b"")))
        # Error boxes are as wide as the terminal; a word must not be broken in the middle.
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


class FakeRouter(InferenceServiceServicer, AdminServiceServicer):
    """Answers with `words`, one chunk each, and remembers what it was asked."""

    def __init__(self) -> None:
        self.words = ["Paris", " is", " it."]
        self.requests: list[inference_service_pb2.GenerateRequest] = []
        self.authorizations: list[object] = []
        self.status = admin_service_pb2.GetClusterStatusResponse(router="router-0", model="tiny")
        self.explained: dict[str, admin_service_pb2.GetRouteExplainResponse] = {}
        self.models = [inference_service_pb2.Model(name="tiny", max_model_len=64, weights_id="abc")]
        self.address = ""
        self.breaks_off = False
        # When set, answer 0 ends and the others wait for it.
        self.hold: threading.Event | None = None

    def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        n = request.n or 1
        for start, word in enumerate(self.words):
            for index in range(n):
                chunk = inference_service_pb2.Chunk(
                    index=index, start_index=start, token_ids=[100 + start], text=word
                )
                yield inference_service_pb2.GenerateResponse(chunk=chunk)
        if self.breaks_off:
            context.set_trailing_metadata((("baton-error-code", "UNAVAILABLE"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is lost")
        for index in range(n):
            chunk = inference_service_pb2.Chunk(
                index=index, start_index=len(self.words), finish_reason=common_pb2.FINISH_REASON_STOP
            )
            yield inference_service_pb2.GenerateResponse(chunk=chunk)
            if self.hold is not None:
                self.hold.wait(10)
        yield inference_service_pb2.GenerateResponse(
            summary=inference_service_pb2.Summary(
                request_id="req-1",
                model="tiny",
                choices=[
                    inference_service_pb2.Choice(
                        index=index,
                        finish_reason=common_pb2.FINISH_REASON_STOP,
                        num_output_tokens=len(self.words),
                    )
                    for index in range(n)
                ],
                num_prompt_tokens=7,
                num_output_tokens=len(self.words),
                seed=42,
                timings=inference_service_pb2.Timings(
                    bucket="<128",
                    prefill_worker="prefill-0",
                    decode_worker="decode-0",
                    ttft_ms=12.5,
                    transfer_times=common_pb2.TransferTimes(open_ms=1.5, commit_ms=2.5),
                    transfer_hidden_share=0.75,
                ),
            )
        )

    def ListModels(self, request, context):  # noqa: N802
        return inference_service_pb2.ListModelsResponse(models=self.models)

    def GetClusterStatus(self, request, context):  # noqa: N802
        return self.status

    def GetRouteExplain(self, request, context):  # noqa: N802
        if request.request_id not in self.explained:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no request {request.request_id!r} here")
        return self.explained[request.request_id]


@contextmanager
def running(credentials: grpc.ServerCredentials | None = None) -> Iterator[FakeRouter]:
    fake = FakeRouter()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_InferenceServiceServicer_to_server(fake, server)
    add_AdminServiceServicer_to_server(fake, server)
    any_port = "127.0.0.1:0"
    port = (
        server.add_secure_port(any_port, credentials) if credentials else server.add_insecure_port(any_port)
    )
    fake.address = f"127.0.0.1:{port}"
    server.start()
    yield fake
    server.stop(0).wait()


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with running() as fake:
        yield fake


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    """The files of a cluster on 127.0.0.1."""
    return Authority(tmp_path).issue("127.0.0.1")


@pytest.fixture
def public_router(tls: TlsFiles) -> Iterator[FakeRouter]:
    """With the TLS of a public port."""
    with running(tls.public_server_credentials()) as fake:
        yield fake


@pytest.fixture
def private_router(tls: TlsFiles) -> Iterator[FakeRouter]:
    """With the TLS of an admin port."""
    with running(tls.server_credentials()) as fake:
        yield fake


@pytest.fixture
def control() -> Iterator[FakeControl]:
    with serving() as fake:
        yield fake


@pytest.fixture
def private_control(tls: TlsFiles) -> Iterator[FakeControl]:
    """With the TLS of a control port."""
    with serving(tls.server_credentials()) as fake:
        yield fake
