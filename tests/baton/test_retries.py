"""The SDK asks again before the first token, within one budget, and only where that can help."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton import AsyncClient, Retry
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NonFiniteLogits,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from tests.baton.scripted_router import GUARD_S, Answer, Scripted, serving, three_chunks

QUICK = Retry(initial_s=0.01, max_s=0.02)


def failing(times: int, error: BatonError) -> Answer:
    """Refuses that often, then answers."""

    async def answer(server: Scripted, context: Any) -> None:
        if len(server.requests) <= times:
            raise error
        await three_chunks(server, context)

    return answer


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after_s=0.01), Unavailable("no worker yet")], ids=["full", "no worker"]
)
async def test_what_passes_is_not_seen(error: BatonError) -> None:
    async with (
        serving(failing(3, error)) as (scripted, server),
        await AsyncClient.connect(server.address, retry=QUICK) as client,
    ):
        assert await client.generate("hello").text() == "one two"
        assert len(scripted.requests) == 4


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("bad", field="top_p"), Unauthenticated("who?"), NonFiniteLogits("NaN")],
    ids=lambda error: type(error).__name__,
)
async def test_what_does_not_pass_is_asked_once(error: BatonError) -> None:
    async with (
        serving(failing(9, error)) as (scripted, server),
        await AsyncClient.connect(server.address, retry=QUICK) as client,
    ):
        with pytest.raises(type(error)):
            await client.generate("hello").text()
        assert len(scripted.requests) == 1


async def test_the_policy_of_the_client_bounds_the_tries() -> None:
    retry = Retry(max_attempts=3, initial_s=0.0)
    async with (
        serving(failing(9, Unavailable("no worker"))) as (scripted, server),
        await AsyncClient.connect(server.address, retry=retry) as client,
    ):
        with pytest.raises(Unavailable, match="no worker"):
            await client.generate("hello").text()
        assert len(scripted.requests) == 3


async def test_a_longer_wait_than_the_budget_is_not_begun() -> None:
    async with (
        serving(failing(9, Overloaded("full", retry_after_s=60.0))) as (scripted, server),
        await AsyncClient.connect(server.address) as client,
        asyncio.timeout(GUARD_S),
    ):
        with pytest.raises(Overloaded) as error:
            await client.generate("hello").text()
        assert error.value.retry_after_s == 60.0
        assert len(scripted.requests) == 1


async def test_a_longer_wait_than_the_deadline_is_not_begun() -> None:
    async with (
        serving(failing(9, Overloaded("full", retry_after_s=5.0))) as (scripted, server),
        await AsyncClient.connect(server.address) as client,
        asyncio.timeout(GUARD_S / 4),
    ):
        with pytest.raises(Overloaded):
            await client.generate("hello", timeout_s=4.0).text()
        assert len(scripted.requests) == 1


async def test_a_router_that_leaves_too_late_for_another_one_is_a_deadline() -> None:
    slow = Retry(initial_s=60.0, max_s=60.0)
    async with (
        serving(failing(9, Draining("leaving"))) as (_, server),
        await AsyncClient.connect(server.address, retry=slow) as client,
        asyncio.timeout(GUARD_S),
    ):
        client._rng.seed(1)
        with pytest.raises(DeadlineExceeded, match="before another router"):
            await client.generate("hello", timeout_s=4.0).text()


async def test_an_objective_that_cannot_be_met_is_not_waited_for() -> None:
    async with (
        serving(failing(1, Overloaded("too late", retry_after_s=0.01))) as (scripted, server),
        await AsyncClient.connect(server.address, retry=QUICK) as client,
    ):
        with pytest.raises(Overloaded, match="too late"):
            await client.generate("hello", ttft_objective_ms=5.0).text()
        assert len(scripted.requests) == 1


async def test_the_next_router_may_have_room() -> None:
    async with (
        serving(failing(9, Overloaded("full"))) as (first, server),
        serving() as (second, other),
        await AsyncClient.connect([server.address, other.address], retry=QUICK) as client,
    ):
        assert await client.generate("hello").text() == "one two"
        assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_models_are_asked_for_again_too() -> None:
    async with serving() as (_, server):
        client = await AsyncClient.connect(server.address, retry=QUICK)
    async with client:
        asked = asyncio.create_task(client.list_models())
        await asyncio.sleep(0)
        async with serving(port=server.port), asyncio.timeout(GUARD_S):
            assert [model.name for model in await asked] == ["tiny"]


async def test_a_deadline_is_over_all_tries() -> None:
    async with serving() as (_, server):
        client = await AsyncClient.connect(server.address, retry=QUICK)
    async with client, asyncio.timeout(GUARD_S / 4):
        for call in (client.generate("hello", timeout_s=0.3).text(), client.list_models(timeout_s=0.3)):
            with pytest.raises(BatonError) as error:
                await call
            assert error.value.code == "DEADLINE_EXCEEDED"
