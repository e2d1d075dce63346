"""One worker served over real sockets and a real Redis: what is told of it, and the order of its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.health import WorkerHealth, WorkerLoad
from baton.identity import Identity
from baton.redis_server import EmbeddedRedis
from baton.registry import Announcement, RedisRegistry
from baton.rpc import open_channel
from baton.rpc_server import RpcServer
from baton.tls import TlsFiles
from baton.v1 import common_pb2
from baton.worker_process import Served, serve_worker

GUARD_S = 10
READY = WorkerHealth(is_ready=True, is_alive=True)


@dataclass
class Worker:
    """A worker that is what a test says."""

    state: WorkerHealth = READY
    drained: list[float] = field(default_factory=list)
    may_leave: asyncio.Event = field(default_factory=asyncio.Event)
    failure: asyncio.Future[None] | None = None

    async def run(self) -> None:
        self.failure = asyncio.get_running_loop().create_future()
        await self.failure

    async def drain(self, grace_s: float) -> None:
        self.state = replace(self.state, is_ready=False, reason="it is leaving")
        self.drained.append(grace_s)
        await self.may_leave.wait()

    def health(self) -> WorkerHealth:
        return self.state

    def load(self) -> WorkerLoad:
        return WorkerLoad(num_attempts=3, num_running=2, num_waiting=1, num_free_blocks=5, num_blocks=9)

    def ledger(self) -> dict[str, int]:
        return {}

    def totals(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class Settings:
    redis_url: str
    ready_file: str
    name: str = "decode-7"
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    health_port: int | None = None
    namespace: str = "test"
    drain_s: float = 12.5


@dataclass
class Rig:
    worker: Worker
    served: Served
    bound: list[str]
    settings: Settings
    stop: asyncio.Event
    task: asyncio.Task[None]
    registry: RedisRegistry

    async def announced(self) -> list[tuple[str, str, bool]]:
        async with aclosing(self.registry.watch()) as changes:
            return [(info.name, info.address, info.draining) for info in await anext(changes)]


@asynccontextmanager
async def serving(folder: Path, **settings: str) -> AsyncIterator[Rig]:
    async with EmbeddedRedis() as redis, RedisRegistry(redis.url, "test") as registry:
        worker, stop, bound = Worker(), asyncio.Event(), []
        made = Settings(redis_url=redis.url, ready_file=str(folder / "ready.json"), **settings)
        identity = Identity(
            name=made.name,
            role=common_pb2.ROLE_DECODE,
            incarnation=11,
            fingerprint=common_pb2.Fingerprint(),
        )
        served: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve_worker(
                worker,
                [],
                identity=identity,
                settings=made,
                tls=TlsFiles(),
                stop=stop,
                on_bound=bound.append,
                on_serving=served.set_result,
            )
        )
        async with asyncio.timeout(GUARD_S):
            rig = Rig(worker, await served, bound, made, stop, task, registry)
        try:
            yield rig
        finally:
            task.cancel()
            await asyncio.wait([task])


async def shown(address: str, service: str) -> bool:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_pb2_grpc.HealthStub(channel).Check(request)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_shown(address: str, **states: bool) -> None:
    async with asyncio.timeout(GUARD_S):
        while {name: await shown(address, name) for name in states} != states:
            await asyncio.sleep(0.01)


async def test_whoever_started_it_can_ask_once_it_is_announced(tmp_path: Path) -> None:
    async with serving(tmp_path) as r:
        assert r.bound == [r.served.address]
        assert await r.announced() == [("decode-7", r.served.address, False)]
        assert r.served.health() == READY
        assert r.served.load().num_free_blocks == 5
        ready = json.loads((tmp_path / "ready.json").read_text())
        assert ready["address"] == r.served.address


async def test_health_follows_the_worker(tmp_path: Path) -> None:
    async with serving(tmp_path) as r:
        address = r.served.address
        await wait_shown(address, readiness=True, liveness=True)
        assert await shown(address, "")
        r.worker.state = WorkerHealth(is_ready=False, is_alive=True, reason="busy")
        await wait_shown(address, readiness=False, liveness=True)
        assert not await shown(address, "")
        r.worker.state = WorkerHealth(is_ready=False, is_alive=False, reason="stuck")
        await wait_shown(address, readiness=False, liveness=False)
        r.worker.state = READY
        await wait_shown(address, readiness=True, liveness=True)


async def test_it_leaves_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as r:
        r.stop.set()
        async with asyncio.timeout(GUARD_S):
            while (await r.announced()) != [("decode-7", r.served.address, True)]:
                await asyncio.sleep(0.01)
            # Its grace time has begun: not ready, but alive, announced and to be talked to.
            await wait_shown(r.served.address, readiness=False, liveness=True)
            assert r.worker.drained == [12.5]
            assert not r.task.done()
            stop, announced_then = RpcServer.stop, []

            async def stopping(server: RpcServer, grace_s: float = 0.0) -> None:
                announced_then.append(await r.announced())
                await stop(server, grace_s)

            monkeypatch.setattr(RpcServer, "stop", stopping)
            r.worker.may_leave.set()
            await r.task
        # Nobody hears of an address where nobody answers any more.
        assert announced_then == [[]]
        with pytest.raises(grpc.aio.AioRpcError):
            await shown(r.served.address, "")


async def test_a_step_that_fails_ends_a_worker_that_is_leaving(tmp_path: Path) -> None:
    async with serving(tmp_path) as r:
        r.stop.set()
        async with asyncio.timeout(GUARD_S):
            while not r.worker.drained:
                await asyncio.sleep(0.01)
            assert r.worker.failure is not None
            r.worker.failure.set_exception(OSError("device"))
            with pytest.raises(OSError, match="device"):
                await r.task
        assert await r.announced() == []


async def test_what_it_announces_may_name_the_bound_port_and_the_worker(tmp_path: Path) -> None:
    async with serving(tmp_path, advertise="{name}.pool:{port}") as r:
        port = json.loads((tmp_path / "ready.json").read_text())["address"].rpartition(":")[2]
        assert int(port) > 0
        assert r.bound == [f"decode-7.pool:{port}"]
        assert await r.announced() == [("decode-7", f"decode-7.pool:{port}", False)]


async def test_a_defect_of_its_announcement_ends_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(announcement: Announcement) -> None:
        raise TypeError("a defect of the client library")

    monkeypatch.setattr(Announcement, "keep", keep)
    async with serving(tmp_path) as r:
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(TypeError, match="client library"):
                await r.task
        assert await r.announced() == []


async def test_a_drain_goes_on_though_it_cannot_be_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def update(announcement: Announcement, info: object) -> None:
        raise TypeError("a defect of the client library")

    monkeypatch.setattr(Announcement, "update", update)
    async with serving(tmp_path) as r:
        r.stop.set()
        async with asyncio.timeout(GUARD_S):
            while "announcement failed" not in caplog.text:
                await asyncio.sleep(0.01)
            await wait_shown(r.served.address, readiness=False, liveness=True)
            assert not r.task.done()
            r.worker.may_leave.set()
            await r.task
        assert await r.announced() == []
