"""The registry on a real Redis server, which the tests kill, empty and fill with garbage."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from baton.errors import ConfigError, Unavailable
from baton.ports import WorkerInfo
from baton.redis_server import EmbeddedRedis
from baton.registry import RedisRegistry, decode, encode
from tests.baton.announcing import announcing

P0 = WorkerInfo(name="prefill-0", role="prefill", incarnation=0xFEDCBA9876543210, address="127.0.0.1:50051")
D0 = WorkerInfo(name="decode-0", role="decode", incarnation=7, address="[::1]:50052")


@pytest.fixture
async def redis() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server


def registry_at(server: EmbeddedRedis, namespace: str = "test", grace_s: float = 0.5) -> RedisRegistry:
    return RedisRegistry(
        server.url, namespace, rng=random.Random(1), poll_s=0.02, max_backoff_s=0.1, grace_s=grace_s
    )


@asynccontextmanager
async def watching(
    registry: RedisRegistry,
) -> AsyncIterator[Callable[[], asyncio.Future[Sequence[WorkerInfo]]]]:
    async with aclosing(registry.watch()) as changes:
        yield lambda: asyncio.wait_for(anext(changes), 10)


async def test_a_watch_yields_at_once_and_on_every_change(redis: EmbeddedRedis) -> None:
    async with (
        registry_at(redis) as worker,
        # Where Redis was never away, nobody who has left stands for that time.
        registry_at(redis, grace_s=60) as router,
        watching(router) as change,
    ):
        assert await change() == ()
        await worker.register(P0, ttl_s=60)
        assert await change() == (P0,)
        await worker.register(D0, ttl_s=60)
        assert await change() == (D0, P0)
        await worker.register(replace(P0, draining=True), ttl_s=60)
        assert await change() == (D0, replace(P0, draining=True))
        await worker.deregister(P0)
        assert await change() == (D0,)


async def test_an_announcement_that_is_not_renewed_ends(redis: EmbeddedRedis) -> None:
    async with registry_at(redis) as registry, watching(registry) as change:
        await registry.register(P0, ttl_s=0.2)
        assert await change() == (P0,)
        assert await change() == ()


async def test_two_incarnations_of_one_worker_are_two_entries(redis: EmbeddedRedis) -> None:
    async with registry_at(redis) as registry, watching(registry) as change:
        await registry.register(P0, ttl_s=60)
        await registry.register(replace(P0, incarnation=1), ttl_s=60)
        assert await change() == (replace(P0, incarnation=1), P0)


async def test_clusters_do_not_see_each_other(redis: EmbeddedRedis) -> None:
    async with registry_at(redis, "blue") as blue, registry_at(redis, "green") as green:
        await blue.register(P0, ttl_s=60)
        async with watching(blue) as change:
            assert await change() == (P0,)
        async with watching(green) as change:
            assert await change() == ()


async def test_garbage_is_ignored_with_one_warning_each(
    redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    good = json.loads(encode(P0))
    garbage = {
        "1": b"\xff\xfe",
        "2": b"[" * 2000,
        "3": json.dumps(good | {"padding": "x" * 4000}).encode(),
        "4": json.dumps(good | {"role": "router"}).encode(),
        "5": json.dumps(good | {"address": "evil host:1"}).encode(),
        "6": json.dumps(good).encode(),
    }
    async with Redis.from_url(redis.url) as client:
        for name, value in garbage.items():
            await client.set(f"test:worker:{name}", value)
        await client.rpush("test:worker:list", "a")
    async with registry_at(redis) as registry, watching(registry) as change:
        await registry.register(P0, ttl_s=60)
        assert await change() == (P0,)
        await registry.register(D0, ttl_s=60)
        assert await change() == (D0, P0)
    warned = [record.msg["key"] for record in caplog.records if "ignored" in str(record.msg)]
    assert sorted(warned) == [f"test:worker:{name}" for name in [*garbage, "list"]]


async def test_a_watch_keeps_the_last_known_workers_while_redis_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with EmbeddedRedis() as first, registry_at(first) as registry, watching(registry) as change:
        await registry.register(P0, ttl_s=60)
        assert await change() == (P0,)
        waiting = asyncio.ensure_future(change())
        await first.__aexit__(None, None, None)
        with pytest.raises(Unavailable, match="Redis"):
            await registry.register(P0, ttl_s=60)
        await until_failed(registry, 3)
        assert not waiting.done()
        async with EmbeddedRedis(port=first.port, password=first.password):
            await registry.register(D0, ttl_s=60)
            # The new server is empty: who is not announced there yet stands for a while.
            assert await waiting == (D0, P0)
            assert await change() == (D0,)
    events = [record.msg["event"] for record in caplog.records if record.name == "baton.registry"]
    assert events == ["registry away", "registry back"]


async def until_failed(registry: RedisRegistry, num_failures: int) -> None:
    async with asyncio.timeout(10):
        while registry.num_failures < num_failures:
            await asyncio.sleep(0.01)


async def test_a_watch_started_without_redis_yields_nobody_and_then_finds_them() -> None:
    async with EmbeddedRedis() as server:
        port, password = server.port, server.password
    async with registry_at(server) as registry, watching(registry) as change:
        assert await change() == ()
        async with EmbeddedRedis(port=port, password=password):
            await registry.register(P0, ttl_s=60)
            assert await change() == (P0,)


async def test_registering_survives_an_emptied_redis_and_withdraws_at_the_end(redis: EmbeddedRedis) -> None:
    async with (
        registry_at(redis) as registry,
        watching(registry) as change,
        Redis.from_url(redis.url) as client,
    ):
        assert await change() == ()
        async with announcing(registry, P0, ttl_s=0.3) as announcement:
            assert await change() == (P0,)
            await announcement.update(replace(P0, draining=True))
            assert await change() == (replace(P0, draining=True),)
            for _ in range(2):
                await client.flushall()
                await until_stored(client, 1)
        assert await client.dbsize() == 0


async def until_stored(client: Redis, num_keys: int) -> None:
    async with asyncio.timeout(10):
        while await client.dbsize() != num_keys:
            await asyncio.sleep(0.01)


async def test_registering_renews_before_the_time_to_live_is_over(redis: EmbeddedRedis) -> None:
    async with (
        registry_at(redis) as registry,
        announcing(registry, P0, ttl_s=1.2),
        Redis.from_url(redis.url) as client,
    ):
        key = (await client.keys())[0]
        lives_ms = [await client.pttl(key)]
        async with asyncio.timeout(10):
            # Only a renewal makes the rest of its life longer.
            while lives_ms[-1] <= min(lives_ms):
                lives_ms.append(await client.pttl(key))
                await asyncio.sleep(0.01)
    assert 0 < min(lives_ms) < 1200


async def test_a_worker_starts_and_stops_without_redis(caplog: pytest.LogCaptureFixture) -> None:
    async with EmbeddedRedis() as server:
        pass
    async with registry_at(server) as registry, announcing(registry, P0, ttl_s=0.03) as announcement:
        for _ in range(3):
            await announcement.refresh()
    events = [record.msg["event"] for record in caplog.records if record.name == "baton.registry"]
    assert events == ["announcement failed", "withdrawal failed"]


async def test_an_announcement_is_about_one_incarnation(redis: EmbeddedRedis) -> None:
    async with registry_at(redis) as registry, announcing(registry, P0, ttl_s=60) as announcement:
        with pytest.raises(ValueError, match="incarnation"):
            await announcement.update(replace(P0, incarnation=1))


async def test_a_wrong_password_is_unavailable_and_not_shown(redis: EmbeddedRedis) -> None:
    url = redis.url.replace(redis.password, "wrong-password")
    async with RedisRegistry(url, "test") as registry:
        with pytest.raises(Unavailable, match="AuthenticationError") as caught:
            await registry.register(P0, ttl_s=1)
    assert "wrong-password" not in caught.value.message


@pytest.mark.parametrize(
    "url", ["localhost:6379", "redis://:geheim@host:port/0", "redis://h:1/0?colour=geheim", "http://geheim:1"]
)
def test_a_bad_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://") as caught:
        RedisRegistry(url, "test")
    assert caught.value.field == "redis_url"
    assert "geheim" not in caught.value.message


@pytest.mark.parametrize("namespace", ["", "a*", "a:b", "ä", "x" * 65, "a\n"])
def test_a_namespace_with_special_characters_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        RedisRegistry("redis://h:1/0", namespace)


names = st.from_regex(r"[a-zA-Z0-9._-]{1,128}", fullmatch=True)


@given(
    st.builds(
        WorkerInfo,
        name=names,
        role=st.sampled_from(["prefill", "decode"]),
        incarnation=st.integers(0, 2**64 - 1),
        address=st.sampled_from(["127.0.0.1:1", "[fe80::1%eth0]:65535", "decode-0.decode.baton.svc:50051"]),
        draining=st.booleans(),
    )
)
def test_a_worker_survives_the_store(info: WorkerInfo) -> None:
    assert decode(encode(info).encode()) == info


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(json.loads(encode(P0)))), json_values, min_size=1))
def test_values_of_other_types_are_value_errors_or_workers(changes: dict[str, object]) -> None:
    value = json.dumps(json.loads(encode(P0)) | changes).encode()
    try:
        info = decode(value)
    except ValueError:
        return
    assert json.loads(encode(info)) == json.loads(value)


@given(st.binary())
def test_any_bytes_are_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(value)
