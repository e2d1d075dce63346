"""Asking Redis: whoever asks can be cancelled at any time, whatever the client library forgets."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.redis_client import asking, open_redis


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
async def test_a_cancel_that_the_client_library_forgets_is_heard(fails: bool) -> None:
    redis = open_redis("redis://127.0.0.1:1")
    begun = asyncio.Event()

    async def forgetful() -> str:
        with suppress(asyncio.CancelledError):
            begun.set()
            await asyncio.Event().wait()
        if fails:
            raise RedisConnectionError("the connection is gone, too")
        return "answered all the same"

    task = asyncio.create_task(asking(redis, forgetful()))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_cancel_from_before_is_nothing_new() -> None:
    async def cancelled_once() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

        async def answer() -> str:
            return "answered"

        return await asking(open_redis("redis://127.0.0.1:1"), answer())

    assert await asyncio.create_task(cancelled_once()) == "answered"
