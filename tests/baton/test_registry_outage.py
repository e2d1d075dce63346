"""A Redis that hangs, loads, is full, is demoted or emptied: what stands, and when all is well again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from baton import redis_client
from baton.errors import Unavailable
from baton.ports import WorkerInfo
from baton.redis_server import EmbeddedRedis
from baton.registry import ANNOUNCED_S, Announcement, RedisRegistry, decode
from tests.baton.announcing import announcing
from tests.simulation.virtual_loop import VirtualLoop

P0 = WorkerInfo(name="prefill-0", role="prefill", incarnation=1, address="127.0.0.1:50051")
D0 = WorkerInfo(name="decode-0", role="decode", incarnation=2, address="127.0.0.1:50052")
KEY = "test:worker:0000000000000001"
# What an operator is promised (docs), and the parts it is made of.
RECONVERGED_S = 10.0
ANNOUNCED_AGAIN_S = 4.0
STEP_S = 2.0

Change = Callable[[], asyncio.Future[Sequence[WorkerInfo]]]


@pytest.fixture
async def redis() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "_STEP_S", 0.1)


def registry_at(url: str) -> RedisRegistry:
    return RedisRegistry(url, "test", rng=random.Random(1), poll_s=0.02, max_backoff_s=0.1, grace_s=0.3)


@asynccontextmanager
async def watching(registry: RedisRegistry) -> AsyncIterator[Change]:
    async with aclosing(registry.watch()) as changes:
        yield lambda: asyncio.wait_for(anext(changes), 10)


@contextmanager
def hanging(server: EmbeddedRedis) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def until_announced(client: Redis, info: WorkerInfo) -> None:
    async with asyncio.timeout(10):
        while (value := await client.get(KEY)) is None or decode(value) != info:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("short_steps")
async def test_while_redis_hangs_the_last_known_workers_stand(redis: EmbeddedRedis) -> None:
    async with registry_at(redis.url) as registry, watching(registry) as change:
        await registry.register(P0, ttl_s=60)
        assert await change() == (P0,)
        waiting = asyncio.ensure_future(change())
        with hanging(redis):
            with pytest.raises(Unavailable, match="Timeout"):
                await registry.register(D0, ttl_s=60)
            await until(lambda: registry.num_failures >= 3)
            assert not waiting.done()
        # What was sent to a hanging Redis is carried out when it goes on.
        assert await waiting == (D0, P0)


async def test_no_command_takes_longer_than_all_its_steps_may(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "_COMMAND_S", 0.1)
    async with registry_at(redis.url) as registry:
        await registry.register(P0, ttl_s=60)
        with hanging(redis), pytest.raises(Unavailable, match="TimeoutError"):
            # The first step alone may take 2 s.
            await registry.register(D0, ttl_s=60)
        await registry.register(P0, ttl_s=60)


async def test_a_worker_that_drains_or_leaves_does_not_wait_for_a_redis_that_hangs(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("baton.registry._AT_ONCE_S", 0.05)
    drains = replace(P0, draining=True)
    async with registry_at(redis.url) as registry, Redis.from_url(redis.url) as client:
        async with announcing(registry, P0, ttl_s=6) as announcement:
            with hanging(redis):
                await announcement.update(drains)
            # The keeper says it again.
            await client.flushall()
            await until_announced(client, drains)
            os.kill(redis.pid, signal.SIGSTOP)
        os.kill(redis.pid, signal.SIGCONT)
    assert [r.msg["event"] for r in caplog.records if r.name == "baton.registry"] == ["withdrawal failed"]


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """A server that answers everything with one reply; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while await reader.read(65_536):
                writer.write(reply)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


@pytest.mark.parametrize(
    "reply",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-BUSY Redis is busy running a script.\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*100000000\r\n",
    ],
    ids=["loading", "masterdown", "noauth", "busy", "another server", "a promise of more"],
)
@pytest.mark.usefixtures("short_steps")
async def test_whatever_answers_instead_of_redis_is_redis_away(reply: bytes) -> None:
    async with answering(reply) as url, registry_at(url) as registry, watching(registry) as change:
        assert await change() == ()
        with pytest.raises(Unavailable, match="Redis"):
            await registry.register(P0, ttl_s=60)
        waiting = asyncio.ensure_future(change())
        await until(lambda: registry.num_failures >= 3)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_full_redis_drops_nobody_who_is_connected_and_is_told_again_later(
    redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis.from_url(redis.url) as client, registry_at(redis.url) as registry:
        async with announcing(registry, P0, ttl_s=0.3):
            await until_announced(client, P0)
            await client.config_set("maxmemory", "1")
            await until(lambda: "OutOfMemory" in caplog.text)
            await client.delete(KEY)
            await client.config_set("maxmemory", "64mb")
            await until_announced(client, P0)
        assert await client.get(KEY) is None


class Switch:
    """A name that can be moved to another server: new connections go there, open ones stay where they are."""

    def __init__(self, port: int) -> None:
        self.target_port = port

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            await asyncio.gather(_pipe(reader, target_writer), _pipe(target_reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
    writer.close()


async def test_a_failover_that_closes_no_socket_is_followed(redis: EmbeddedRedis) -> None:
    switch = Switch(redis.port)
    async with (
        EmbeddedRedis(password=redis.password) as promoted,
        switch.listening() as port,
        registry_at(redis.url.replace(f":{redis.port}/", f":{port}/")) as registry,
        Redis.from_url(redis.url) as old,
        Redis.from_url(promoted.url) as new,
        announcing(registry, P0, ttl_s=0.6),
    ):
        await until_announced(old, P0)
        await old.config_set("masterauth", redis.password)
        switch.target_port = promoted.port
        await old.replicaof("127.0.0.1", promoted.port)
        await until_announced(new, P0)
        # And again after the new one was wiped.
        await new.flushall()
        assert await new.dbsize() <= 1
        await until_announced(new, P0)
        assert await new.dbsize() == 1


class StagedRedis:
    """Announcements on virtual time, and when each command was given; while it is away, every one takes a
    step and fails."""

    def __init__(self) -> None:
        self.is_away = False
        self.workers: dict[int, WorkerInfo] = {}
        self.asked_at: list[float] = []

    async def command(self) -> None:
        self.asked_at.append(asyncio.get_running_loop().time())
        if self.is_away:
            await asyncio.sleep(STEP_S)
            raise Unavailable("Redis is away")


class StagedRegistry(RedisRegistry):
    def __init__(self, staged: StagedRedis, seed: int) -> None:
        super().__init__("redis://nowhere.invalid", "test", rng=random.Random(seed))
        self._staged = staged

    async def register(self, info: WorkerInfo, ttl_s: float) -> None:
        await self._staged.command()
        self._staged.workers[info.incarnation] = info

    async def _read(self) -> tuple[WorkerInfo, ...]:
        await self._staged.command()
        return tuple(self._staged.workers.values())


def on_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()
    assert loop.errors == []


@pytest.mark.parametrize("seed", range(20))
def test_an_emptied_redis_is_filled_and_read_within_its_time_after_an_outage(seed: int) -> None:
    async def scenario() -> None:
        rng, staged, seen = random.Random(seed), StagedRedis(), asyncio.Event()
        registry = StagedRegistry(staged, seed)
        infos = [replace(D0, name=f"decode-{i}", incarnation=rng.getrandbits(64)) for i in range(20)]
        joining = replace(P0, incarnation=rng.getrandbits(64))

        async def follow() -> None:
            async for workers in registry.watch():
                if joining in workers:
                    assert set(infos) <= set(workers)
                    seen.set()

        async def announce(info: WorkerInfo) -> None:
            announcement = Announcement(registry, info)
            await announcement.refresh()
            await announcement.keep()

        tasks = [asyncio.create_task(announce(info)) for info in infos]
        tasks.append(asyncio.create_task(follow()))
        await asyncio.sleep(10)
        staged.is_away = True
        tasks.append(asyncio.create_task(announce(joining)))
        await asyncio.sleep(60 + rng.uniform(0, 5))
        assert not seen.is_set()
        staged.is_away = False
        staged.workers.clear()
        async with asyncio.timeout(ANNOUNCED_AGAIN_S):
            while len(staged.workers) < 21:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(RECONVERGED_S - ANNOUNCED_AGAIN_S):
            await seen.wait()
        for task in tasks:
            task.cancel()

    on_virtual_time(scenario())


@pytest.mark.parametrize("is_away", [False, True], ids=["well", "away"])
def test_workers_and_routers_that_began_together_do_not_ask_together(is_away: bool) -> None:
    async def scenario() -> None:
        staged = StagedRedis()
        staged.is_away = is_away
        rng = random.Random(1)

        async def follow(seed: int) -> None:
            async for _ in StagedRegistry(staged, seed).watch():
                pass

        keepers = [
            Announcement(StagedRegistry(staged, i), replace(D0, incarnation=rng.getrandbits(64))).keep()
            for i in range(20)
        ]
        tasks = [asyncio.ensure_future(work) for work in [*keepers, *map(follow, range(5))]]
        await asyncio.sleep(30)
        for task in tasks:
            task.cancel()
        later = sorted(at for at in staged.asked_at if at > 0)
        # B19: no 50 ms hold more than a tenth of what all ask in half a minute, and there is a stated cap:
        # a worker asks at most once a second, a router twice and a half.
        assert max(sum(at <= other < at + 0.05 for other in later) for at in later) <= len(later) / 10
        assert len(later) <= 30 * (20 * 1.0 + 5 * 2.5)

    on_virtual_time(scenario())


def test_after_an_outage_who_is_not_announced_again_goes_in_the_end() -> None:
    async def scenario() -> None:
        staged = StagedRedis()
        registry = StagedRegistry(staged, 1)
        staged.workers = {1: P0, 2: D0}
        async with aclosing(registry.watch()) as changes:
            assert await anext(changes) == (P0, D0)
            waiting = asyncio.ensure_future(anext(changes))
            staged.is_away = True
            await asyncio.sleep(30)
            staged.workers, staged.is_away = {2: replace(D0, draining=True)}, False
            back_at = asyncio.get_running_loop().time()
            # What is announced counts at once, who is not stands for the time of one announcement.
            assert await waiting == (replace(D0, draining=True), P0)
            assert asyncio.get_running_loop().time() - back_at <= RECONVERGED_S - ANNOUNCED_AGAIN_S
            assert await anext(changes) == (replace(D0, draining=True),)
            assert asyncio.get_running_loop().time() - back_at >= ANNOUNCED_S

    on_virtual_time(scenario())


async def test_a_redis_that_was_away_between_two_polls_is_given_the_same_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with EmbeddedRedis() as first, registry_at(first.url) as router, watching(router) as change:
        async with registry_at(first.url) as worker:
            await worker.register(P0, ttl_s=60)
        # Nothing is polled until the next change is asked for.
        assert await change() == (P0,)
        await first.__aexit__(None, None, None)
        async with (
            EmbeddedRedis(port=first.port, password=first.password),
            registry_at(first.url) as worker,
        ):
            await worker.register(D0, ttl_s=60)
            assert await change() == (D0, P0)
            assert await change() == (D0,)
    # No poll has failed.
    assert caplog.records == []


@pytest.mark.usefixtures("short_steps")
async def test_a_worker_that_started_without_redis_is_announced_once_it_is_there() -> None:
    async with EmbeddedRedis() as server:
        port, password, url = server.port, server.password, server.url
    async with (
        registry_at(url) as registry,
        announcing(registry, P0, ttl_s=0.3),
        EmbeddedRedis(port=port, password=password),
        Redis.from_url(url) as client,
    ):
        await until_announced(client, P0)
        assert await client.dbsize() == 1
