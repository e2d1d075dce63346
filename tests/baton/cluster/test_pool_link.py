"""What is known of Ray's workers, whether or not their pool can be asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.cluster import pool_link
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
def kept() -> list[dict[str, int]]:
    """How many workers the next start of the pool was to have, each time that changed."""
    return []


@pytest.fixture
def link(ready_file: Path, kept: list[dict[str, int]]) -> PoolLink:
    counts = {"prefill": 1, "decode": 1}
    return PoolLink(
        ready_file, lambda: 1, counts, open_channel, keep=lambda counts: kept.append(dict(counts))
    )


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


async def test_what_it_told_last_stays_known_while_it_is_started_again(
    ready_file: Path, kept: list[dict[str, int]]
) -> None:
    pids = [1]
    link = PoolLink(ready_file, lambda: pids[0], {"decode": 1}, open_channel, keep=kept.append)
    assert not link.is_answering
    async with serving(FakePool(DECODE), ready_file):
        await link.list_workers()
        assert link.is_answering
    # First its port is closed, then its process is known to be gone, then there is another one.
    for pids[0] in (1, 0, 2):
        (worker,) = (await link.list_workers()).workers
        assert (worker.name, worker.state) == ("decode-0", pool_service_pb2.POOL_WORKER_STATE_RESTARTING)
        assert worker.reason == "the pool that places workers on Ray is being started again"
        with pytest.raises(Unavailable) as caught:
            await link.scale(common_pb2.ROLE_DECODE, 2)
        assert caught.value.message == worker.reason
    assert (link.names, link.is_answering) == ({"decode-0"}, False)


async def test_one_that_lives_and_does_not_answer_is_not_said_to_start_again(
    link: PoolLink, ready_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(FakePool(DECODE), ready_file) as pool:
        await link.list_workers()
        monkeypatch.setattr(pool_link, "_ASK_S", 0.05)
        pool.hold = asyncio.Event()
        (worker,) = (await link.list_workers()).workers
        pool.hold.set()
    assert worker.state == pool_service_pb2.POOL_WORKER_STATE_UNHEALTHY
    assert worker.reason == "the pool that places workers on Ray does not answer"


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


def worker(name: str, state: str = "SERVING", *, reason: str = "") -> PoolWorker:
    role = common_pb2.Role.Value(f"ROLE_{name.partition('-')[0].upper()}")
    value = pool_service_pb2.PoolWorkerState.Value(f"POOL_WORKER_STATE_{state}")
    return PoolWorker(name=name, role=role, state=value, reason=reason, runner="ray")


async def test_a_pool_that_starts_again_shall_have_as_many_as_were_wanted_last(
    link: PoolLink, ready_file: Path, kept: list[dict[str, int]]
) -> None:
    async with serving(FakePool(worker("prefill-0"), worker("decode-0")), ready_file) as pool:
        await link.list_workers()
        assert kept == []
        await link.scale(common_pb2.ROLE_DECODE, 3)
        assert kept == [{"prefill": 1, "decode": 3}]
        pool.drained = worker("decode-0")
        await link.drain("decode-0", dry_run=True, force=False)
        assert len(kept) == 1
        await link.drain("decode-0", dry_run=False, force=False)
        assert kept[1:] == [{"prefill": 1, "decode": 2}]
        # Twice the same one.
        pool.drained = worker("decode-0", "DRAINING")
        await link.drain("decode-0", dry_run=False, force=False)
        assert len(kept) == 2
        # A pool that is told to end drains all of them, and is started again with as many.
        pool.workers = [worker("prefill-0", "DRAINING")]
        await link.list_workers()
    await link.list_workers()
    assert len(kept) == 2


async def test_what_there_is_no_room_for_is_not_waited_for_at_the_pools_next_start(
    link: PoolLink, ready_file: Path, kept: list[dict[str, int]]
) -> None:
    waiting = worker("decode-1", "PLACING", reason="no node has GPU 1 free")
    first = [worker("prefill-0"), worker("decode-0")]
    async with serving(FakePool(*first, worker("decode-1", "PLACING")), ready_file) as pool:
        await link.scale(common_pb2.ROLE_DECODE, 2)
        pool.workers[-1] = waiting
        await link.list_workers()
        pool.workers[-1] = worker("decode-1")
        await link.list_workers()
        pool.workers[-1] = waiting
        await link.list_workers()
    assert [counts["decode"] for counts in kept] == [2, 1, 2, 1]


async def test_what_the_last_pool_had_no_room_for_is_not_wanted_of_the_next(
    ready_file: Path, kept: list[dict[str, int]]
) -> None:
    pids = [1]
    link = PoolLink(ready_file, lambda: pids[0], {"decode": 2}, open_channel, keep=kept.append)
    pool = FakePool(worker("decode-0"), worker("decode-1", "PLACING", reason="no node has GPU 1 free"))
    async with serving(pool, ready_file):
        await link.list_workers()
    pids[0], pool.workers = 2, [worker("decode-0")]
    async with serving(pool, ready_file, pid=2):
        await link.list_workers()
    assert kept == [{"decode": 1}]


async def test_a_role_whose_last_worker_was_drained_has_one_after_a_new_start(
    link: PoolLink, ready_file: Path, kept: list[dict[str, int]]
) -> None:
    async with serving(FakePool(worker("prefill-0")), ready_file) as pool:
        pool.drained = worker("decode-0")
        await link.drain("decode-0", dry_run=False, force=True)
        await link.scale(common_pb2.ROLE_PREFILL, 2)
    assert kept == [{"prefill": 2, "decode": 1}]
