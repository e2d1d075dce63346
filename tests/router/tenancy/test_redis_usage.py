"""Counts on a real Redis server, which the tests fill with garbage and stop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from baton.errors import ConfigError, Overloaded, Unavailable
from baton.redis_server import EmbeddedRedis
from router.tenancy.rate_limits import RateLimits, Usage
from router.tenancy.rate_sync import RateSync
from router.tenancy.redis_usage import RedisUsage
from router.tenancy.tenants import Tenant

# The second has all 64 bits.
ME, OTHER = 0xAA, 0xFEDCBA9876543210
MINE = "00000000000000aa"


@pytest.fixture
async def redis() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server


def usage(window: int, num_requests: int, num_tokens: int, router: int = ME, tenant: str = "search") -> Usage:
    return Usage(
        router=router, tenant=tenant, window=window, num_requests=num_requests, num_tokens=num_tokens
    )


async def test_routers_hear_each_other_and_each_count_replaces_the_last(redis: EmbeddedRedis) -> None:
    async with RedisUsage(redis.url, "t") as one, RedisUsage(redis.url, "t") as other:
        assert await one.exchange([], [7, 8]) == []
        said = [usage(7, 1, 20), usage(8, 2, 30, tenant="m.a-i_l"), usage(8, 1, 5)]
        assert sorted(await one.exchange(said, [7, 8]), key=str) == sorted(said, key=str)
        await one.exchange([usage(7, 4, 80)], [])
        theirs = usage(7, 9, 10**15 - 1, OTHER)
        assert set(await other.exchange([theirs], [7])) == {usage(7, 4, 80), theirs}


async def test_every_key_ends_by_itself_and_holds_only_names_and_counts(redis: EmbeddedRedis) -> None:
    async with RedisUsage(redis.url, "t") as store, Redis.from_url(redis.url) as client:
        await store.exchange([usage(7, 1, 20), usage(8, 2, 30)], [7, 8, 9])
        keys = sorted(await client.keys())
        assert keys == [b"t:rate:7", b"t:rate:8"]
        # Seven windows of 10 s before the present one are read at most.
        assert all([80 < await client.ttl(key) <= 120 for key in keys])
        assert await client.hgetall(b"t:rate:7") == {f"{MINE} search".encode(): b"1 20"}


async def test_clusters_do_not_hear_each_other(redis: EmbeddedRedis) -> None:
    async with RedisUsage(redis.url, "blue") as blue, RedisUsage(redis.url, "green") as green:
        await blue.exchange([usage(7, 1, 20)], [])
        assert await green.exchange([], [7]) == []


async def test_garbage_is_ignored(redis: EmbeddedRedis) -> None:
    garbage = {
        "": "1 2", "x": "1 2", MINE: "1 2", f"{MINE} a b": "1 2", f"{MINE.upper()} a": "1 2",
        f"{MINE} {'a' * 65}": "1 2",
        f"{MINE} a": "", f"{MINE} b": "-1 2", f"{MINE} c": "1", f"{MINE} d": f"1 {'9' * 16}",
        f"{MINE} e": "1 2 3", f"{MINE} f": b"\xff 1",
    }  # fmt: skip
    async with RedisUsage(redis.url, "t") as store, Redis.from_url(redis.url) as client:
        await client.hset("t:rate:7", mapping=garbage)
        await client.set("t:rate:8", "a string")
        await store.exchange([usage(7, 1, 20), usage(9, 1, 1)], [])
        assert await store.exchange([], [7, 8, 9]) == [usage(7, 1, 20), usage(9, 1, 1)]
        # What stands under a key that this window needs spoils that window only.
        assert await store.exchange([usage(8, 5, 5), usage(9, 2, 2)], [8, 9]) == [usage(9, 2, 2)]


async def test_a_redis_that_is_away_is_unavailable_and_one_that_is_back_is_used() -> None:
    async with EmbeddedRedis() as first, RedisUsage(first.url, "t") as store:
        await store.exchange([usage(7, 1, 20)], [7])
        await first.__aexit__(None, None, None)
        with pytest.raises(Unavailable, match="Redis") as error:
            await store.exchange([], [7])
        assert first.password not in error.value.message
        async with EmbeddedRedis(port=first.port, password=first.password):
            assert await store.exchange([usage(7, 3, 4)], [7]) == [usage(7, 3, 4)]


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        RedisUsage("localhost:6379", "t")
    assert error.value.field == "redis_url"


async def test_two_routers_share_one_limit(redis: EmbeddedRedis) -> None:
    tenant = Tenant(name="search", requests_per_minute=60, tokens_per_minute=10**6)
    one, other = RateLimits([tenant], ME), RateLimits([tenant], OTHER)
    now = asyncio.get_running_loop().time()
    async with RedisUsage(redis.url, "t") as store, RedisUsage(redis.url, "t") as another:
        syncs = [
            RateSync(limits, mine, rng=random.Random(1), wall=lambda: 1e9)
            for limits, mine in ((one, store), (other, another))
        ]
        for sync in syncs:
            await sync.exchange()
        for _ in range(60):
            one.take(tenant, now, 10)
        for sync in syncs:
            await sync.exchange()
        with pytest.raises(Overloaded, match="requests_per_minute, 60"):
            other.take(tenant, now, 1)
        async with Redis.from_url(redis.url) as client:
            assert await client.keys() == [b"t:rate:100000000"]
