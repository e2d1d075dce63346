"""API keys: their form, that nothing shows them, and where the SDK sends them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton import AsyncClient, Client
from baton.api_keys import ApiKey, refuse_plain_text
from baton.errors import ConfigError, Unauthenticated, Unavailable
from tests.baton.scripted_router import SUMMARY, Response, Scripted, background, serving
from tests.certificates import Authority

KEY = "0123456789abcdef"
SENT = f"Bearer {KEY}"


def test_the_digest_is_sha_256() -> None:
    # printf 0123456789abcdef | sha256sum
    assert ApiKey(KEY).digest == "sha256:9f9f5111f7b27a781f1f1ddde5ebc2dd2b796bfc7365c9c28b548e564176929f"


def test_a_key_is_not_shown() -> None:
    assert KEY not in f"{ApiKey(KEY)!r} {ApiKey(KEY)}"


@pytest.mark.parametrize(
    "secret", ["", "x" * 15, "x" * 257, "0123456789 abcdef", "0123456789abcdef\n", "ä" * 20, 5 * 10**20]
)
def test_a_key_of_another_form_is_refused_without_being_shown(secret: Any) -> None:
    with pytest.raises(ConfigError, match="16 to 256 ASCII characters") as error:
        ApiKey(secret)
    assert error.value.field == "api_key"
    assert not secret or str(secret) not in error.value.message


LOCAL = [
    "127.0.0.1:50051", "127.1.2.3:1", "localhost:50051", "LocalHost:1", "[::1]:50051", "unix:/run/baton",
    "unix:///run/baton", "dns:localhost:1", "dns:///127.0.0.1:1", "dns://10.0.0.1/localhost:1",
    "ipv4:127.0.0.1:1", "ipv6:[::1]:1",
]  # fmt: skip
ELSEWHERE = [
    "10.0.0.1:50051", "router:50051", "localhost.example.com:1", "127.0.0.1.example.com:1", "[2001:db8::1]:1",
    "[::ffff:10.0.0.1]:1", "0.0.0.0:1", "dns:///router:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "xds:///localhost:1",
    "", "dns:///localhost@router:1",
]  # fmt: skip


@pytest.mark.parametrize("target", LOCAL)
def test_this_machine_may_have_a_key_in_plain_text(target: str) -> None:
    refuse_plain_text([target])
    # Of several targets all are looked at: it is not for the first one's sake that this is let pass.
    with pytest.raises(ConfigError, match="in plain text"):
        refuse_plain_text([target, ELSEWHERE[0]])


@pytest.mark.parametrize("target", ELSEWHERE)
def test_another_machine_may_not(target: str) -> None:
    with pytest.raises(ConfigError, match="in plain text; set tls_ca, or say insecure_key") as error:
        refuse_plain_text(["127.0.0.1:1", target])
    assert error.value.field == "api_key"


async def test_every_call_carries_the_key() -> None:
    async with serving() as (scripted, server):
        async with await AsyncClient.connect(server.address, api_key=KEY) as client:
            await client.generate("hello").text()
            await client.list_models()
        assert [metadata["authorization"] for metadata in scripted.metadata] == [SENT, SENT]


async def test_a_function_is_asked_for_the_key_before_each_call() -> None:
    keys = iter([KEY, KEY[::-1], "short"])
    async with serving() as (scripted, server):
        async with await AsyncClient.connect(server.address, api_key=lambda: next(keys)) as client:
            await client.generate("hello").text()
            await client.list_models()
            with pytest.raises(ConfigError, match="16 to 256"):
                client.generate("hello")
        sent = [metadata["authorization"] for metadata in scripted.metadata]
        assert sent == [SENT, f"Bearer {KEY[::-1]}"]


async def test_without_a_key_nothing_is_said() -> None:
    async with serving() as (scripted, server), await AsyncClient.connect(server.address) as client:
        await client.generate("hello").text()
        assert "authorization" not in scripted.metadata[0]


async def test_the_next_router_gets_the_key_too() -> None:
    async def stop(scripted: Scripted, context: Any) -> None:
        stopping.append(asyncio.create_task(server.stop()))
        await asyncio.Event().wait()

    async def answer(scripted: Scripted, context: Any) -> None:
        await context.write(Response(summary=SUMMARY))

    stopping: list[asyncio.Task[None]] = []
    async with serving(stop) as (first, server), serving(answer) as (second, other):
        async with await AsyncClient.connect([server.address, other.address], api_key=KEY) as client:
            await client.generate("hello").text()
        assert first.metadata[0]["authorization"] == second.metadata[0]["authorization"] == SENT


async def test_a_refused_key_is_an_error_of_its_own_and_not_tried_elsewhere() -> None:
    async def refuse(scripted: Scripted, context: Any) -> None:
        raise Unauthenticated("not known", field="authorization")

    async with serving(refuse) as (_, server), serving() as (second, other):
        async with await AsyncClient.connect([server.address, other.address], api_key=KEY) as client:
            with pytest.raises(Unauthenticated, match="not known") as error:
                await client.generate("hello").text()
        assert error.value.field == "authorization"
        assert second.requests == []


async def test_any_target_over_the_network_needs_tls_or_consent(tmp_path: Any) -> None:
    targets = ["127.0.0.1:1", "192.0.2.1:1"]
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:1"):
        await AsyncClient.connect(targets, api_key=KEY, tls=False)
    for allowed in ({"insecure_key": True}, {"tls_ca": Authority(tmp_path).path}):
        with pytest.raises(Unavailable):
            await AsyncClient.connect(targets, timeout_s=0.1, api_key=KEY, **allowed)


def test_the_synchronous_client_sends_it_too() -> None:
    with background() as (scripted, address):
        with Client.connect(address, api_key=KEY) as client:
            client.generate("hello").text()
        assert scripted.metadata[0]["authorization"] == SENT
        with pytest.raises(ConfigError):
            Client.connect("192.0.2.1:1", api_key=KEY, tls=False)
