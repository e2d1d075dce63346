"""From producer to client: nothing lost, merged when the client is slow."""

from __future__ import annotations

import asyncio

from router.token_stream import Tokens, TokenStream


async def test_a_fast_client_gets_tokens_one_by_one() -> None:
    stream = TokenStream()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.push([7], [-0.5])
    assert await waiting == Tokens(0, [7], [-0.5])
    stream.push([8], [-1.5])
    assert await stream.next() == Tokens(1, [8], [-1.5])


async def test_a_slow_client_gets_them_merged() -> None:
    stream = TokenStream()
    for token_id in (7, 8, 9):
        stream.push([token_id], [])
    assert await stream.next() == Tokens(0, [7, 8, 9], [])
    stream.push([10], [])
    assert await stream.next() == Tokens(3, [10], [])


async def test_the_end_comes_after_what_was_pushed() -> None:
    stream = TokenStream()
    stream.push([7], [])
    stream.end()
    assert await stream.next() == Tokens(0, [7], [])
    assert await stream.next() is None
    assert await stream.next() is None


async def test_the_end_wakes_a_client_that_waits() -> None:
    stream = TokenStream()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.end()
    async with asyncio.timeout(5):
        assert await waiting is None
