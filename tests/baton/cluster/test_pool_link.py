"""What is known of Ray's workers, whether or not their pool can be asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster.pool_link import PoolLink
from baton.errors import InvalidRequest, Unavailable
from baton.rpc import open_channel
from baton.v1 import common_pb2, pool_service_pb2
from baton.v1.pool_service_pb2 import PoolWorker
from tests.baton.cluster.fake_pool import FakePool, serving

SERVING = pool_service_pb2.POOL_WORKER_STATE_SERVING
DECODE = PoolWorker(name="decode-0", role=common_pb2.ROLE_DECODE, state=SERVING, runner="ray", pid=5)


@pytest.fixture
def ready_file(tmp_path: Path) -> Path:
    return tmp_path / "pool.json"


@pytest.fixture
def link(ready_file: Path) -> PoolLink:
    return PoolLink(ready_file, lambda: 1, ["prefill-0", "decode-0"], open_channel)


async def test_before_it_has_started_its_workers_are_being_placed(link: PoolLink) -> None:
    listed = await link.list_workers()
    assert [(worker.name, worker.role, worker.state) for worker in listed.workers] == [
        ("decode-0", common_pb2.ROLE_DECODE, pool_service_pb2.POOL_WORKER_STATE_PLACING),
        ("prefill-0", common_pb2.ROLE_PREFILL, pool_service_pb2.POOL_WORKER_STATE_PLACING),
    ]
    assert link.names == {"decode-0", "prefill-0"}
    assert "has not started yet" in listed.workers[0].reason
    assert link.dashboard_url == ""


async def test_it_is_asked_where_its_ready_file_says(link: PoolLink, ready_file: Path) -> None:
    leaving = PoolWorker(name="decode-1", state=pool_service_pb2.POOL_WORKER_STATE_DRAINING)
    async with serving(FakePool(DECODE, leaving), ready_file):
        listed = await link.list_workers()
        assert [worker.name for worker in listed.workers] == ["decode-0", "decode-1"]
        assert (listed.dashboard_url, listed.ray_silent_ms) == ("http://ray", 7)
        assert link.names == {"decode-0"}
        assert link.dashboard_url == "http://ray"


async def test_what_it_told_last_stays_known_when_it_is_gone(link: PoolLink, ready_file: Path) -> None:
    async with serving(FakePool(DECODE), ready_file):
        await link.list_workers()
    (worker,) = (await link.list_workers()).workers
    assert (worker.name, worker.state) == ("decode-0", pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY)
    assert "no control port answers" in worker.reason
    assert link.names == {"decode-0"}


async def test_the_file_of_a_pool_that_died_is_not_believed(link: PoolLink, ready_file: Path) -> None:
    async with serving(FakePool(DECODE), ready_file, pid=2) as pool:
        with pytest.raises(Unavailable, match="has not started yet"):
            await link.scale(common_pb2.ROLE_DECODE, 2)
    assert pool.asked == []


async def test_what_it_refuses_is_refused_in_its_words(link: PoolLink, ready_file: Path) -> None:
    async with serving(FakePool(DECODE), ready_file) as pool:
        pool.refusal = "no room for 3"
        with pytest.raises(InvalidRequest, match="no room for 3") as caught:
            await link.scale(common_pb2.ROLE_DECODE, 3)
    assert caught.value.field == "num_workers"
