"""A control port over which the test decides what happens next."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from baton.errors import BatonError
from baton.rpc import to_status
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import DrainResponse, ListWorkersResponse, PoolWorker, ScaleResponse
from baton.v1.pool_service_pb2_grpc import PoolServiceServicer, add_PoolServiceServicer_to_server


def worker(
    name: str,
    state: str = "SERVING",
    *,
    pid: int = 100,
    reason: str = "",
    runner: str = "process",
    release: str = "",
) -> PoolWorker:
    role = common_pb2.ROLE_DECODE if name.startswith("decode") else common_pb2.ROLE_PREFILL
    return PoolWorker(
        name=name,
        role=role,
        state=pool_service_pb2.PoolWorkerState.Value(f"POOL_WORKER_STATE_{state}"),
        reason=reason,
        node="127.0.0.1",
        pid=pid,
        runner=runner,
        num_restarts=2,
        num_attempts=3,
        since_ms=61_000,
        release=release,
    )


class FakeControl(PoolServiceServicer):
    """Answers ListWorkers with each of `lists` in turn, the last one for ever; with `refusal` it refuses."""

    def __init__(self) -> None:
        self.address = ""
        self.lists: list[list[PoolWorker]] = [[]]
        self.dashboard_url = ""
        self.ray_silent_ms = 0
        self.scaled = ScaleResponse()
        self.drained = DrainResponse()
        self.refusal: BatonError | None = None
        self.asked: list[object] = []

    def ListWorkers(self, request, context):  # noqa: N802
        workers = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return ListWorkersResponse(
            workers=workers, dashboard_url=self.dashboard_url, ray_silent_ms=self.ray_silent_ms
        )

    def Scale(self, request, context):  # noqa: N802
        return self._answer(request, self.scaled, context)

    def Drain(self, request, context):  # noqa: N802
        return self._answer(request, self.drained, context)

    def _answer(self, request, response, context):
        self.asked.append(request)
        if self.refusal is not None:
            code, details, metadata = to_status(self.refusal)
            context.set_trailing_metadata(metadata)
            context.abort(code, details)
        return response


@contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[FakeControl]:
    fake = FakeControl()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_PoolServiceServicer_to_server(fake, server)
    any_port = "127.0.0.1:0"
    port = (
        server.add_secure_port(any_port, credentials) if credentials else server.add_insecure_port(any_port)
    )
    fake.address = f"127.0.0.1:{port}"
    server.start()
    yield fake
    server.stop(0).wait()
