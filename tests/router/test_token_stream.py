"""From producer to client: nothing lost, merged when the client is slow."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import InternalError
from baton.v1 import common_pb2
from router.token_stream import PromptTokens, Tokens, TokenStream


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


def prompt(start: int, *logprobs: float) -> common_pb2.PromptLogprobs:
    tops = [common_pb2.TopLogprobs(token_ids=[index]) for index, _ in enumerate(logprobs, start=start)]
    return common_pb2.PromptLogprobs(start_index=start, logprobs=logprobs, top_logprobs=tops)


async def test_likeliest_tokens_stay_with_their_tokens() -> None:
    stream = TokenStream(3)
    tops = [common_pb2.TopLogprobs(token_ids=[token_id]) for token_id in (7, 8)]
    stream.push([7], [-0.5], tops[:1])
    stream.push([8], [-1.5], tops[1:])
    assert await stream.next() == Tokens(3, [7, 8], [-0.5, -1.5], tops)


async def test_the_prompt_comes_first_and_once_also_when_it_is_computed_again() -> None:
    stream = TokenStream()
    stream.push_prompt_logprobs(prompt(1, -0.5, -1.5))
    assert await stream.next() == PromptTokens(1, [-0.5, -1.5], list(prompt(1, 0, 0).top_logprobs))
    stream.push([7], [])
    stream.push_prompt_logprobs(prompt(1, -0.5, -1.5))
    stream.push_prompt_logprobs(prompt(2, -1.5, -2.5))
    assert await stream.next() == PromptTokens(3, [-2.5], list(prompt(3, 0).top_logprobs))
    assert await stream.next() == Tokens(0, [7], [])
    assert stream.num_prompt_tokens == 4


async def test_a_gap_in_the_prompt_is_a_defect_of_ours() -> None:
    stream = TokenStream()
    with pytest.raises(InternalError, match="log-probability 1 of the prompt is missing"):
        stream.push_prompt_logprobs(prompt(2, -0.5))
