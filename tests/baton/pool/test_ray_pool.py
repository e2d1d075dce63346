"""A pool on a local Ray, which all tests here share. Its workers are idle: they serve nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from baton import __version__
from baton.cluster.free_ports import claim
from baton.errors import InvalidRequest
from baton.exit_status import WRONG_SETTING
from baton.rpc import translate
from baton.tether import tethered
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import PoolWorker
from baton.v1.pool_service_pb2_grpc import PoolServiceStub

ROOT = Path(__file__).parents[3]
PATIENCE_S = 40.0
SERVING = pool_service_pb2.POOL_WORKER_STATE_SERVING
RESTARTING = pool_service_pb2.POOL_WORKER_STATE_RESTARTING
UNHEALTHY = pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class RunningPool:
    process: subprocess.Popen[bytes]
    stub: Any
    folder: Path
    ray_dir: Path
    facts: dict[str, Any]

    async def list(self) -> pool_service_pb2.ListWorkersResponse:
        return await self.stub.ListWorkers(pool_service_pb2.ListWorkersRequest())

    async def workers(self) -> dict[str, PoolWorker]:
        return {worker.name: worker for worker in (await self.list()).workers}

    async def until(self, is_so: Callable[[dict[str, PoolWorker]], bool]) -> dict[str, PoolWorker]:
        """The workers, once they are as wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so(workers := await self.workers()):
                await asyncio.sleep(0.05)
        return workers

    async def scale(self, number: int) -> pool_service_pb2.ScaleResponse:
        return await self.stub.Scale(
            pool_service_pb2.ScaleRequest(role=common_pb2.ROLE_DECODE, num_workers=number)
        )

    async def held(self) -> dict[str, Any]:
        """What Ray holds: names of groups, and free resources."""
        file = self.folder / "ray.json"
        file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(PATIENCE_S):
            while not file.exists():
                await asyncio.sleep(0.02)
        return json.loads(file.read_text())

    async def until_held(self, wanted: dict[str, Any]) -> None:
        """Ray counts free resources some moments later than it frees them; groups it counts at once."""
        async with asyncio.timeout(PATIENCE_S):
            while (held := await self.held())["free"]["baton_decode"] != wanted["free"]["baton_decode"]:
                await asyncio.sleep(0.1)
        assert held["groups"] == wanted["groups"]

    async def metrics(self) -> list[str]:
        """The lines that Ray exports for a collector."""
        (found,) = json.loads((self.ray_dir / "prom_metrics_service_discovery.json").read_text())
        pages = [await page(f"http://{target}/metrics") for target in found["targets"]]
        return [line for page in pages for line in page.splitlines()]


async def page(url: str) -> str:
    """What is served there, once it is: Ray names a node's port before its agent listens."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await asyncio.to_thread(read, url)
            except urllib.error.URLError:
                await asyncio.sleep(0.2)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def serving(*names: str) -> Callable[[dict[str, PoolWorker]], bool]:
    return lambda workers: (
        list(workers) == list(names) and all(worker.state == SERVING for worker in workers.values())
    )


def start(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    base = (f"--log-dir={folder}", f"--ready-file={folder}/ready", "--control-port=0", "--drain-s=1")
    command = tethered([sys.executable, "-m", "tests.idle_pool", *base, *flags])
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stderr=log)


@asynccontextmanager
async def running(folder: Path, ray_dir: str, *flags: str) -> AsyncIterator[RunningPool]:
    """A pool once its workers have started; it ends with the block."""
    process = start(folder, *flags)
    try:
        async with asyncio.timeout(60):
            while not (folder / "ready").exists():
                assert process.poll() is None, (folder / "log").read_text()
                await asyncio.sleep(0.05)
        facts = json.loads((folder / "ready").read_text())
        async with grpc.aio.insecure_channel(facts["control_address"]) as channel:
            yield RunningPool(process, PoolServiceStub(channel), folder, Path(ray_dir), facts)
    finally:
        process.terminate()
        status = await asyncio.to_thread(process.wait, 40)
        (folder / "ready").unlink(missing_ok=True)
    assert status == 0, (folder / "log").read_text()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningPool]:
    """One that began with two workers."""
    folder = tmp_path_factory.mktemp("pool")
    flags = ("--decode=2", "--unhealthy-s=4", f"--dashboard-port={claim(0, 'dashboard_port')}")
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as ray_dir:
        async with running(folder, ray_dir, f"--ray-dir={ray_dir}", *flags) as pool:
            yield pool


async def test_workers_are_listed_with_where_they_run_and_what_is_reserved(pool) -> None:
    workers = await pool.until(serving("decode-0", "decode-1"))
    assert len({worker.pid for worker in workers.values()}) == 2
    for worker in workers.values():
        os.kill(worker.pid, 0)
        assert (worker.node, worker.runner, worker.resources) == ("127.0.0.1", "ray", "baton_decode 1")
        assert (worker.role, worker.num_attempts, worker.num_restarts) == (common_pb2.ROLE_DECODE, 3, 0)
        assert worker.actor_id
        assert worker.release == __version__
    assert set(pool.facts) == {"dashboard_url", "control_address", "pid"}


async def test_a_killed_worker_comes_back_and_ray_holds_what_it_held(pool) -> None:
    before = await pool.until(serving("decode-0", "decode-1"))
    held = await pool.held()
    assert held["groups"] == ["baton/decode-0", "baton/decode-1"]
    os.kill(before["decode-0"].pid, signal.SIGKILL)
    after = await pool.until(lambda now: now["decode-0"].num_restarts == 1 and serving(*before)(now))
    assert after["decode-0"].pid != before["decode-0"].pid
    assert after["decode-1"].pid == before["decode-1"].pid
    assert held["free"]["baton_decode"] == 62.0
    await pool.until_held(held)


async def test_a_worker_that_gets_a_signal_leaves_and_is_started_again(pool) -> None:
    before = await pool.until(serving("decode-0", "decode-1"))
    os.kill(before["decode-1"].pid, signal.SIGTERM)
    after = await pool.until(lambda now: now["decode-1"].num_restarts == 1 and serving(*before)(now))
    assert after["decode-1"].pid != before["decode-1"].pid


async def test_scaling_up_and_down_leaves_nothing_behind(pool) -> None:
    await pool.until(serving("decode-0", "decode-1"))
    held = await pool.held()
    up = await pool.scale(3)
    assert (list(up.added), list(up.removed)) == (["decode-2"], [])
    await pool.until(serving("decode-0", "decode-1", "decode-2"))
    down = await pool.scale(2)
    assert (list(down.added), list(down.removed)) == ([], ["decode-2"])
    await pool.until(serving("decode-0", "decode-1"))
    await pool.until_held(held)


async def test_the_last_worker_is_not_drained(pool) -> None:
    await pool.until(serving("decode-0", "decode-1"))
    ask = pool_service_pb2.DrainRequest(name="decode-1", dry_run=True)
    told = await pool.stub.Drain(ask)
    assert (told.worker.name, told.num_others, told.grace_ms) == ("decode-1", 1, 11_000)
    ask.dry_run = False
    await pool.stub.Drain(ask)
    await pool.until(serving("decode-0"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.stub.Drain(pool_service_pb2.DrainRequest(name="decode-0"))
    error = translate(caught.value)
    assert (type(error), error.field) == (InvalidRequest, "force")
    await pool.scale(2)
    await pool.until(serving("decode-0", "decode-1"))


async def test_a_workers_figures_are_among_rays_metrics(pool) -> None:
    await pool.until(serving("decode-0", "decode-1"))
    async with asyncio.timeout(PATIENCE_S):
        while not (lines := [line for line in await pool.metrics() if line.startswith("ray_baton_worker")]):
            await asyncio.sleep(0.2)
    figures = {line.partition("{")[0]: line for line in lines if 'worker="decode-0"' in line}
    values = {name: float(line.rpartition(" ")[2]) for name, line in figures.items()}
    assert values == {
        "ray_baton_worker_running": 2.0,
        "ray_baton_worker_waiting": 1.0,
        "ray_baton_worker_attempts": 3.0,
        "ray_baton_worker_free_blocks": 5.0,
        "ray_baton_worker_blocks": 8.0,
        "ray_baton_worker_events_total": 7.0,
    }
    assert all('role="decode"' in line for line in figures.values())
    assert 'kind="tokens"' in figures["ray_baton_worker_events_total"]


async def test_a_stopped_worker_is_shown_and_replaced(pool) -> None:
    before = await pool.until(serving("decode-0", "decode-1"))
    with stopped(before["decode-1"].pid):
        seen = await pool.until(lambda now: now["decode-1"].state == UNHEALTHY)
        assert seen["decode-1"].reason == "it does not answer"
        after = await pool.until(lambda now: now["decode-1"].pid not in (0, before["decode-1"].pid))
    assert after["decode-0"].pid == before["decode-0"].pid
    await pool.until(serving("decode-0", "decode-1"))
    with pytest.raises(ProcessLookupError):
        os.kill(before["decode-1"].pid, 0)


async def test_workers_go_on_while_rays_control_service_is_silent(pool) -> None:
    before = await pool.until(serving("decode-0", "decode-1"))
    (gcs,) = [
        child
        for child in psutil.Process(pool.facts["pid"]).children(recursive=True)
        if child.name() == "gcs_server"
    ]
    with stopped(gcs.pid):
        while (await pool.list()).ray_silent_ms == 0:
            await asyncio.sleep(0.1)
        os.kill(before["decode-1"].pid, signal.SIGKILL)
        seen = await pool.until(lambda now: now["decode-1"].state == RESTARTING)
        assert seen["decode-1"].reason == "its process is gone"
        assert (seen["decode-0"].state, seen["decode-0"].pid) == (SERVING, before["decode-0"].pid)
        assert seen["decode-1"].num_restarts == before["decode-1"].num_restarts
    after = await pool.until(
        lambda now: now["decode-1"].pid not in (0, before["decode-1"].pid) and serving(*before)(now)
    )
    assert (await pool.list()).ray_silent_ms == 0
    assert after["decode-0"].pid == before["decode-0"].pid


async def test_a_pool_that_finds_no_room_says_what_is_missing(pool, tmp_path) -> None:
    address = (await pool.held())["address"]
    process = start(
        tmp_path,
        f"--ray-address={address}",
        "--namespace=wanting",
        "--decode-cpus=0",
        "--decode-resources=moon=2",
        "--placement-timeout-s=1",
    )
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1
    log = (tmp_path / "log").read_text()
    assert "Ray found no room for decode-0 within 1 s" in log
    assert "it asks for moon 2 (PACK); 127.0.0.1 has moon 0 of 0 free" in log
    assert [name for name in (await pool.held())["groups"] if name.startswith("wanting/")] == []


async def test_the_next_pool_takes_the_workers_of_a_cluster_over(pool, tmp_path) -> None:
    address = (await pool.held())["address"]
    flags = (f"--ray-address={address}", "--namespace=kept", "--decode-cpus=0.5", "--decode=2")
    async with running(tmp_path / "first", "", *flags, "--keep-workers") as first:
        before = await first.until(serving("decode-0", "decode-1"))
    async with running(tmp_path / "first", "", *flags, "--keep-workers") as second:
        after = await second.until(serving("decode-0", "decode-1"))
    assert [worker.pid for worker in after.values()] == [worker.pid for worker in before.values()]
    # Another place for their logs is another setting; the third pool keeps nothing.
    async with running(tmp_path / "third", "", *flags) as third:
        fourth = start(tmp_path / "fourth", *flags)
        renewed = await third.until(
            lambda now: serving(*before)(now) and all(worker.num_restarts == 1 for worker in now.values())
        )
        # Two pools would each keep the same workers.
        assert await asyncio.to_thread(fourth.wait, PATIENCE_S) == 1
        told = f"namespace kept of this Ray cluster has a pool already: process {third.facts['pid']} on"
        assert told in (tmp_path / "fourth" / "log").read_text()
        assert [worker.pid for worker in (await third.workers()).values()] == [
            worker.pid for worker in renewed.values()
        ]
    assert not {worker.pid for worker in renewed.values()} & {worker.pid for worker in before.values()}
    assert [name for name in (await pool.held())["groups"] if name.startswith("kept/")] == []


async def test_a_worker_that_cannot_start_ends_its_pool_with_the_reason(
    pool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_DECODE_BREAKS", "start")
    address = (await pool.held())["address"]
    process = start(tmp_path, f"--ray-address={address}", "--namespace=broken", "--decode-cpus=0.5")
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == WRONG_SETTING
    assert "decode-0 cannot serve: breaks is 'start'" in (tmp_path / "log").read_text()
