"""A pool that answers what the test tells it to, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from baton.errors import InvalidRequest
from baton.rpc_server import Registration, RpcServer
from baton.v1.pool_service_pb2 import DrainResponse, ListWorkersResponse, PoolWorker, ScaleResponse
from baton.v1.pool_service_pb2_grpc import PoolServiceServicer, add_PoolServiceServicer_to_server


class FakePool(PoolServiceServicer):
    def __init__(self, *workers: PoolWorker) -> None:
        self.workers = list(workers)
        self.asked: list[tuple[object, ...]] = []
        self.address = ""
        self.refusal = ""
        self.drained = PoolWorker()
        # When there is one, lists wait for it.
        self.hold: asyncio.Event | None = None

    async def ListWorkers(self, request, context):  # noqa: N802
        if self.hold is not None:
            await self.hold.wait()
        return ListWorkersResponse(workers=self.workers, dashboard_url="http://ray", ray_silent_ms=7)

    async def Scale(self, request, context):  # noqa: N802
        self.asked.append(("scale", request.role, request.num_workers))
        if self.refusal:
            raise InvalidRequest(self.refusal, field="num_workers")
        return ScaleResponse(added=["decode-9"])

    async def Drain(self, request, context):  # noqa: N802
        self.asked.append(("drain", request.name, request.dry_run, request.force))
        return DrainResponse(worker=self.drained, num_others=4)


@asynccontextmanager
async def serving(pool: FakePool, ready_file: Path | None = None, pid: int = 1) -> AsyncIterator[FakePool]:
    add = partial(add_PoolServiceServicer_to_server, pool)
    async with await RpcServer.start([Registration(name="baton.v1.PoolService", add=add)]) as server:
        pool.address = server.address
        if ready_file is not None:
            facts = {"control_address": server.address, "pid": pid, "dashboard_url": "http://ray"}
            ready_file.write_text(json.dumps(facts))
        yield pool
