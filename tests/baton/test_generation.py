"""What a generation keeps: it can be read at any time, in any way, in one place at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton import AsyncClient, Client
from baton.errors import Cancelled, NonFiniteLogits
from tests.baton.scripted_router import (
    GUARD_S,
    SUMMARY,
    Response,
    Scripted,
    background,
    chunk,
    one_chunk_and_no_end,
    serving,
)

WHOLE = ["one", "", " two"]


async def test_text_and_answers_are_the_whole_after_an_iteration_too() -> None:
    async with serving() as (scripted, server), await AsyncClient.connect(server.address) as client:
        generation = client.generate("hello")
        assert generation.known_answers() == []
        assert [part.text async for part in generation] == WHOLE
        assert await generation.text() == "one two"
        assert await generation.text() == "one two"
        (answer,) = await generation.answers()
        assert (answer.text, answer.token_ids, answer.logprobs) == ("one two", (10, 11, 12), (-0.5,))
        assert [part.text async for part in generation] == WHOLE
        assert len(scripted.requests) == 1


def test_the_synchronous_face_keeps_them_too_even_once_it_is_closed() -> None:
    with background() as (scripted, address):
        with Client.connect(address) as client:
            generation = client.generate("hello")
            assert [part.text for part in generation] == WHOLE
            assert [part.text for part in generation] == WHOLE
            assert generation.text() == "one two"
        assert generation.text() == "one two"
        assert len(scripted.requests) == 1


async def test_a_second_reader_is_told_and_the_first_one_goes_on() -> None:
    go_on = asyncio.Event()

    async def answer(server: Scripted, context: Any) -> None:
        await chunk(context, 0, "zero")
        await go_on.wait()
        await chunk(context, 1, "one")
        await context.write(Response(summary=SUMMARY))

    async with serving(answer) as (_, server), await AsyncClient.connect(server.address) as client:
        generation = client.generate("hello")
        first = aiter(generation)
        assert (await anext(first)).text == "zero"
        with pytest.raises(RuntimeError, match="is being read already, by another task"):
            await generation.text()
        go_on.set()
        assert [part.text async for part in first] == ["one"]
        assert await generation.text() == "zeroone"


def test_a_second_synchronous_reader_leaves_the_first_one_alone() -> None:
    with background(one_chunk_and_no_end) as (scripted, address), Client.connect(address) as client:
        generation = client.generate("hello")
        first = iter(generation)
        assert next(first).text == "one"
        with pytest.raises(RuntimeError, match="is being read already"):
            generation.text()
        with pytest.raises(RuntimeError, match="is being read already"):
            next(iter(generation))
        assert not scripted.cancelled.is_set()
        assert repr(generation).endswith("open>")


async def test_what_was_broken_off_is_never_taken_for_the_whole() -> None:
    async with (
        serving(one_chunk_and_no_end) as (scripted, server),
        await AsyncClient.connect(server.address) as client,
        asyncio.timeout(GUARD_S),
    ):
        async with client.generate("hello") as generation:
            async for part in generation:
                assert part.text == "one"
                break
        for _ in range(2):
            with pytest.raises(Cancelled):
                await generation.text()
        assert len(scripted.requests) == 1


async def test_a_failure_is_the_same_for_whoever_reads_again() -> None:
    async def fail(server: Scripted, context: Any) -> None:
        await chunk(context, 0, "one")
        raise NonFiniteLogits("NaN")

    async with serving(fail) as (scripted, server), await AsyncClient.connect(server.address) as client:
        generation = client.generate("hello")
        for _ in range(2):
            with pytest.raises(NonFiniteLogits, match="NaN"):
                await generation.text()
        assert len(scripted.requests) == 1
