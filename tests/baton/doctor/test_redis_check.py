from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager

import pytest

from baton.doctor import redis_check
from baton.doctor.check import Check
from baton.redis_server import EmbeddedRedis


async def found(url: str) -> list[Check]:
    return [check async for check in redis_check.checks(url, time.time)]


async def test_a_redis_answers_and_its_clock_is_compared() -> None:
    async with EmbeddedRedis() as server:
        redis, clocks = await found(server.url)
    assert redis.state == "ok"
    assert redis.found.startswith("version ")
    # The same machine, so the same clock.
    assert (clocks.name, clocks.state) == ("clocks", "ok")


async def test_a_clock_that_is_wrong_is_a_warning() -> None:
    async with EmbeddedRedis() as server:
        checks = [check async for check in redis_check.checks(server.url, lambda: time.time() - 7.0)]
    assert checks[1].state == "warning"
    assert re.match(r"Redis' is (7\.0|6\.9)\d+ s ahead of this machine's", checks[1].found)


@pytest.mark.parametrize(
    ("skew_s", "error_s", "state"), [(0.9, 0.0, "ok"), (-1.5, 0.1, "warning"), (1.5, 0.6, "ok")]
)
def test_a_slow_answer_is_no_skew(skew_s, error_s, state) -> None:
    assert redis_check.clock(skew_s, error_s=error_s).state == state


async def test_nothing_there_is_a_problem() -> None:
    (check,) = await found("redis://:hunter2@127.0.0.1:1/0")
    assert check.state == "problem"
    assert "hunter2" not in check.found


async def test_a_wrong_url_is_a_problem() -> None:
    (check,) = await found("http://h")
    assert (check.state, "redis_url" in check.remedy) == ("problem", True)


@pytest.mark.parametrize("has_package", [True, False])
@pytest.mark.parametrize("url", ["redis://:hunter2@h:notaport", "http://:hunter2@h", "redis://[hunter2"])
async def test_a_url_that_cannot_be_read_is_a_problem_without_its_password(
    monkeypatch, url: str, has_package: bool
) -> None:
    if not has_package:
        monkeypatch.setattr(redis_check, "find_spec", lambda _name: None)
    (check,) = await found(url)
    assert (check.state, "redis_url" in check.remedy) == ("problem", True)
    assert "hunter2" not in check.found


async def test_without_the_package_a_socket_file_is_asked_where_it_is(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(redis_check, "find_spec", lambda _name: None)
    (nobody,) = await found(f"unix://{tmp_path}/redis.sock")
    assert nobody.state == "problem"
    assert f"nothing answers at unix:{tmp_path}/redis.sock" in nobody.found

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"PING\r\n"
        writer.write(b"+PONG\r\n")
        writer.close()

    server = await asyncio.start_unix_server(connected, tmp_path / "redis.sock")
    (check,) = await found(f"unix://{tmp_path}/redis.sock")
    server.close()
    assert check.state == "ok"


async def test_without_a_url_the_embedded_one_is_looked_for() -> None:
    (check,) = await found("")
    assert (check.state, "redis-server" in check.found) == ("ok", True)


@asynccontextmanager
async def answering(line: bytes):
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"PING\r\n"
        writer.write(line)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    server.close()


@pytest.mark.parametrize(
    ("line", "state"),
    [(b"+PONG\r\n", "ok"), (b"-NOAUTH needed\r\n", "ok"), (b"HTTP/1.1 400 Bad Request\r\n", "problem")],
)
async def test_without_the_package_a_ping_is_tried(monkeypatch, line, state) -> None:
    monkeypatch.setattr(redis_check, "find_spec", lambda _name: None)
    async with answering(line) as url:
        (check,) = await found(url)
    assert check.state == state
