"""How a client connects: at once or later, through interceptors, to several addresses, and what it shows."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

import baton
from baton import AsyncClient, Client, Generation, Retry
from baton.bind import LOOPBACK
from baton.errors import Cancelled, ConfigError, Unavailable
from tests.baton.scripted_router import GUARD_S, one_chunk_and_no_end, serving

KEY = "0123456789abcdef"


async def test_the_environment_names_the_router_and_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (scripted, server):
        monkeypatch.setenv("BATON_ADDRESS", server.address)
        monkeypatch.setenv("BATON_API_KEY", KEY)
        async with await AsyncClient.connect() as client:
            assert await client.generate("hello").text() == "one two"
        assert scripted.metadata[0]["authorization"] == f"Bearer {KEY}"


async def test_a_lazy_client_needs_no_router_yet() -> None:
    async with serving() as (_, server):
        address, port = server.address, server.port
    client = await AsyncClient.connect(address, lazy=True)
    async with client, serving(port=port) as (scripted, _):
        assert scripted.metadata == []
        assert await client.generate("hello").text() == "one two"


async def test_the_first_call_of_a_lazy_client_fails_by_itself() -> None:
    client = await AsyncClient.connect(f"{LOOPBACK}:1", lazy=True, retry=Retry(max_attempts=1))
    async with client:
        with pytest.raises(Unavailable, match="refused"):
            await client.generate("hello").text()
    with pytest.raises(ConfigError):
        await AsyncClient.connect("nowhere", lazy=True)


def tagged(details: Any, tag: str) -> Any:
    said = dict(details.metadata or ())
    said["tags"] = said.get("tags", "") + tag
    return details._replace(metadata=grpc.aio.Metadata(*said.items()))


class TaggingStreams(grpc.aio.UnaryStreamClientInterceptor):
    """Adds its tag to what the call says already."""

    def __init__(self, tag: str) -> None:
        self._tag = tag

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(tagged(details, self._tag), request)


class TaggingCalls(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(tagged(details, "c"), request)


async def test_interceptors_see_every_call_the_first_one_first() -> None:
    tagging = [TaggingStreams("a"), TaggingCalls(), TaggingStreams("b")]
    async with (
        serving() as (scripted, server),
        await AsyncClient.connect(server.address, api_key=KEY, interceptors=tagging) as client,
    ):
        assert await client.generate("hello").text() == "one two"
        await client.list_models()
        assert [metadata["tags"] for metadata in scripted.metadata] == ["ab", "c"]
        assert [metadata["authorization"] for metadata in scripted.metadata] == [f"Bearer {KEY}"] * 2


async def test_a_cancel_passes_through_interceptors() -> None:
    async with (
        serving(one_chunk_and_no_end) as (scripted, server),
        await AsyncClient.connect(server.address, interceptors=[TaggingStreams("a")]) as client,
    ):
        generation = client.generate("hello")
        chunks = aiter(generation)
        assert (await anext(chunks)).text == "one"
        waiting = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0)
        generation.cancel()
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(Cancelled):
                await waiting
        assert await asyncio.to_thread(scripted.cancelled.wait, GUARD_S)


async def test_one_name_with_several_addresses_is_several_routers() -> None:
    """As a headless Service's name is; both are used, and one is enough."""
    async with serving() as (first, server), serving() as (second, other):
        name = f"ipv4:{server.address},{other.address}"
        async with await AsyncClient.connect(name) as client, asyncio.timeout(GUARD_S):
            while not (first.requests and second.requests):
                assert await client.generate("hello").text() == "one two"
            await other.stop()
            num_before = len(first.requests)
            for _ in range(3):
                assert await client.generate("hello").text() == "one two"
            assert len(first.requests) == num_before + 3


def _of(method: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters
    return {name: (p.kind, p.default, p.annotation) for name, p in parameters.items()}


def test_both_clients_have_the_same_calls_with_the_same_arguments() -> None:
    public = {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert public == {name for name in dir(Client) if not name.startswith("_")}
    for name in public:
        assert _of(getattr(Client, name)) == _of(getattr(AsyncClient, name)), name


def test_both_generations_can_do_the_same() -> None:
    from baton.sync_client import Generation as SyncGeneration

    public = {name for name in dir(Generation) if not name.startswith("_")}
    assert public == {name for name in dir(SyncGeneration) if not name.startswith("_")}


async def test_nothing_shows_prompts_or_keys() -> None:
    async with serving() as (_, server):
        client = await AsyncClient.connect(server.address, api_key=KEY)
        async with client:
            generation = client.generate("a secret", request_id="r-1")
            assert repr(client) == f"<AsyncClient of {server.address}>"
            assert repr(generation) == "<Generation r-1, open>"
            await generation.text()
            assert repr(generation) == "<Generation r-1, ended>"
            assert re.fullmatch(r"<Generation req-[0-9a-f]{16}, open>", repr(client.generate("a secret")))


def test_the_package_names_what_it_offers() -> None:
    for name in baton.__all__:
        assert getattr(baton, name) is not None
    assert set(baton.__all__) <= set(dir(baton))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = baton.Nothing


async def test_a_client_spreads_its_tries_by_chance_of_its_own() -> None:
    async with serving() as (_, server):
        clients = [await AsyncClient.connect(server.address) for _ in range(2)]
        drawn = [client._rng.random() for client in clients]
        for client in clients:
            await client.close()
            await client.close()
    assert drawn[0] != drawn[1]
    assert isinstance(clients[0]._rng, random.Random)


@pytest.mark.parametrize("retry", [Retry(max_attempts=1), Retry(total_s=0.0)], ids=["attempts", "time"])
async def test_one_that_never_asks_again_does_not_wait_for_a_router(retry: Retry) -> None:
    async with asyncio.timeout(GUARD_S / 2):
        with pytest.raises(Unavailable, match=r"no router answers at 127\.0\.0\.1:1, 127\.0\.0\.1:2"):
            await AsyncClient.connect(["127.0.0.1:1", "127.0.0.1:2"], timeout_s=60.0, retry=retry)


async def test_nobody_there_is_said_in_words_of_a_lazy_client_too() -> None:
    retry = Retry(max_attempts=1)
    async with await AsyncClient.connect("127.0.0.1:1", lazy=True, retry=retry) as client:
        with pytest.raises(Unavailable, match="nothing answers at its address; is it running"):
            await client.generate("hello").text()
