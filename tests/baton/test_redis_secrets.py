"""Passwords in files, TLS on the way, and the rights that the chart gives: against a real server."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from baton.errors import ConfigError, Unavailable
from baton.ports import WorkerInfo
from baton.redis_client import asking, open_redis
from baton.redis_server import EmbeddedRedis
from baton.registry import RedisRegistry
from checks.chart_render import render
from router.tenancy.rate_limits import Usage
from router.tenancy.redis_usage import RedisUsage
from tests.certificates import Authority

DECODE = WorkerInfo(name="decode-0", role="decode", incarnation=7, address="127.0.0.1:50060")


async def test_a_password_in_a_file_is_read_again_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "password"
    async with EmbeddedRedis(password="first") as server, open_redis(server.url) as admin:
        file.write_text("first\n")
        async with open_redis(f"redis://127.0.0.1:{server.port}/0?password_file={file}") as redis:
            assert await asking(redis, redis.ping())
            await admin.config_set("requirepass", "second")
            file.write_text("second\n")
            # The old connection is let go, as when the server restarts.
            await redis.connection_pool.disconnect()
            assert await asking(redis, redis.ping())
            file.write_text("wrong")
            await redis.connection_pool.disconnect()
            with pytest.raises(Unavailable, match="AuthenticationError"):
                await asking(redis, redis.ping())
            file.unlink()
            with pytest.raises(Unavailable, match="No such file"):
                await asking(redis, redis.ping())


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@127.0.0.1/0?password_file=/a",
        "redis://127.0.0.1/0?password_file=/a&password_file=/b",
        "redis://127.0.0.1:port/0?password_file=/a",
    ],
)
def test_two_passwords_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="password_file=PATH") as caught:
        open_redis(url)
    assert caught.value.field == "redis_url"
    assert "secret" not in caught.value.message


@asynccontextmanager
async def tls_in_front_of(
    port: int, authority: Authority, *, name: str = "127.0.0.1", clients: Authority | None = None, at: int = 0
) -> AsyncIterator[int]:
    """The embedded server knows no TLS: this relay has it, and may ask for certificates. Yields its port."""
    files = authority.issue(name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.path)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", at, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_over_tls_the_server_has_to_be_one_of_the_authoritys(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    async with EmbeddedRedis(password="pw") as server, tls_in_front_of(server.port, ours) as port:
        url = f"rediss://:pw@127.0.0.1:{port}/0"
        async with open_redis(f"{url}?ssl_ca_certs={ours.path}") as redis:
            assert await asking(redis, redis.ping())
        for refused in (url, f"{url}?ssl_ca_certs={others.path}"):
            async with open_redis(refused) as redis:
                with pytest.raises(Unavailable, match="certificate verify failed"):
                    await asking(redis, redis.ping())
        async with open_redis(url.replace("rediss", "redis")) as redis:
            with pytest.raises(Unavailable):
                await asking(redis, redis.ping())


async def test_over_tls_the_certificate_has_to_name_the_host(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    async with EmbeddedRedis() as server, tls_in_front_of(server.port, ours, name="other.internal") as port:
        redis = open_redis(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ours.path}")
        with pytest.raises(Unavailable, match="IP address mismatch"):
            await asking(redis, redis.ping())


async def test_files_of_tls_are_read_again_for_each_connection(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    ca, cert, key = (tmp_path / name for name in ("ca.crt", "tls.crt", "tls.key"))

    def mount(authority: Authority) -> None:
        issued = authority.issue("baton")
        for path, source in ((ca, issued.ca), (cert, issued.cert), (key, issued.key)):
            shutil.copy(source, path)

    mount(old)
    files = f"ssl_ca_certs={ca}&ssl_certfile={cert}&ssl_keyfile={key}"
    async with EmbeddedRedis(password="pw") as server:
        async with tls_in_front_of(server.port, old, clients=old) as port:
            redis = open_redis(f"rediss://:pw@127.0.0.1:{port}/0?{files}")
            assert await asking(redis, redis.ping())
            bare = open_redis(f"rediss://:pw@127.0.0.1:{port}/0?ssl_ca_certs={ca}")
            async with bare:
                with pytest.raises(Unavailable):
                    await asking(bare, bare.ping())
        mount(new)
        async with tls_in_front_of(server.port, new, clients=new, at=port), redis:
            # The old connection is let go, as when the server restarts.
            await redis.connection_pool.disconnect()
            assert await asking(redis, redis.ping())


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("ssl_ca_certs=/nowhere/ca.crt", "ssl_ca_certs=/nowhere/ca.crt, which cannot be used: No such file"),
        ("ssl_ca_certs={text}", "ssl_ca_certs={text}, which cannot be used"),
        ("ssl_certfile={cert}&ssl_keyfile={other}", "ssl_keyfile={other}, which cannot be used"),
        ("ssl_cert_reqs=perhaps", "the Redis URL cannot be used"),
    ],
)
def test_what_is_wrong_with_the_files_of_tls_is_told_at_once(tmp_path: Path, query: str, told: str) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "text").write_text("no certificate")
    paths = {
        "text": tmp_path / "text",
        "cert": authority.issue("a").cert,
        "other": authority.issue("b").key,
    }
    with pytest.raises(ConfigError, match=re.escape(told.format(**paths))) as caught:
        open_redis(f"rediss://:secret@127.0.0.1/0?{query.format(**paths)}")
    assert caught.value.field == "redis_url"
    assert "secret" not in caught.value.message


def chart_users() -> list[str]:
    """The lines of users.acl that the chart's Redis starts with, its password being `pw`."""
    text = render()["redis-statefulset.yaml"]
    found = re.search(r"users\.acl <<END\n(.*?)\n *END\n", text, re.DOTALL)
    assert found is not None
    return [
        line.strip().replace("$digest", hashlib.sha256(b"pw").hexdigest()) for line in found[1].splitlines()
    ]


async def test_the_charts_user_may_do_what_baton_does_and_nothing_else() -> None:
    users = chart_users()
    async with EmbeddedRedis(password="admin") as server, open_redis(server.url) as admin:
        for line in users[1:]:
            await admin.execute_command("ACL", "SETUSER", *line.split()[1:])
        url = f"redis://baton:pw@127.0.0.1:{server.port}/0"
        async with RedisRegistry(url, "demo-baton") as registry:
            await registry.check()
            await registry.register(DECODE, 5.0)
            async for workers in registry.watch():
                assert [worker.name for worker in workers] == ["decode-0"]
                break
            await registry.deregister(DECODE)
        async with RedisUsage(url, "demo-baton") as usage:
            said = [Usage(router=7, tenant="a", window=1, num_requests=1, num_tokens=2)]
            assert await usage.exchange(said, [1]) == said
        async with open_redis(url) as redis:
            refused = (
                redis.set("other:worker:1", "x"),
                redis.flushall(),
                redis.config_get("*"),
                redis.eval("return 1", 0),
                redis.keys("*"),
                redis.acl_list(),
            )
            for command in refused:
                with pytest.raises(NoPermissionError):
                    await command
    assert users[0] == "user default off"
